from labkit.lab.headless.gate import Gate
from labkit.lab.headless.outcome import Outcome, table


def test_the_table_has_a_row_for_each_notebook_then_refusals_failures_and_totals():
    outcomes = [
        Outcome(
            "01_a", cells_run=9, cells=9, gate=Gate(["x", "y"], {"z": "one GPU"}), seconds=3.21
        ),
        Outcome("02_b", kept=True, cells_run=4, cells=4),
        Outcome("03_c", "failed", "ValueError: no", 2, 5, Gate(missing=["w"]), 1.0),
        Outcome("04_d", "not run"),
    ]
    assert table(outcomes, of_series=4) == (
        "notebook  verdict        cells  passed  refused  failed  missing  seconds\n"
        "--------  -------------  -----  ------  -------  ------  -------  -------\n"
        "01_a      passed           9/9       2        1       0        0      3.2\n"
        "02_b      passed (kept)    4/4       0        0       0        0      0.0\n"
        "03_c      failed           2/5       0        0       0        1      1.0\n"
        "04_d      not run          0/0       0        0       0        0      0.0\n"
        "refused  01_a: z: one GPU\n"
        "failed  03_c: ValueError: no\n"
        "2 of 4 notebooks passed; claims: 2 passed, 1 refused, 0 failed, 1 missing"
    )


def test_where_not_all_ran_the_last_line_says_which():
    last = table([Outcome("01_a"), Outcome("11_b", "failed")], of_series=16).splitlines()[-1]
    assert last.startswith("1 of 2 chosen of 16 notebooks passed (01_a, 11_b); claims: ")


def test_the_first_reason_to_fail_stands():
    outcome = Outcome("01_a")
    outcome.fail("first")
    outcome.fail("second")
    assert (outcome.verdict, outcome.reason) == ("failed", "first")
