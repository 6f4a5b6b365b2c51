import json
import multiprocessing

import pytest

from labkit.lab import results
from labkit.lab.results import Record


def record(identity, **fields):
    return Record("99_test", identity, "claim", 1.0, **fields)


def write_many(path, writer):
    for i in range(200):
        results.append(path, record(f"{writer}-{i}", reason="x" * 500))


def test_records_come_back_as_they_went_in(tmp_path):
    path = tmp_path / "run" / "results.jsonl"
    sent = [record("a", unit="B", tolerance={"rel": 0.1}), record("b — ü", status="passed")]
    for one in sent:
        results.append(path, one)
    assert results.read(path) == sent


def test_two_writers_never_mix_their_lines(tmp_path):
    path = tmp_path / "results.jsonl"
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=write_many, args=(path, w)) for w in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert len({r.id for r in results.read(path)}) == 400


def test_a_line_cut_by_a_kill_is_left_out_and_the_rest_is_read(tmp_path):
    path = tmp_path / "results.jsonl"
    results.append(path, record("whole"))
    path.write_bytes(path.read_bytes() + b'{"notebook": "99_te')
    assert [r.id for r in results.read(path)] == ["whole"]


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "results.jsonl"
    results.append(path, record("one"))
    path.write_text("not json\n" + path.read_text())
    with pytest.raises(ValueError, match="line 1"):
        results.read(path)


def test_numbers_that_json_lacks_become_null_with_the_reason(tmp_path):
    path = tmp_path / "results.jsonl"
    results.append(path, Record("99_test", "x", "measurement", float("nan")))
    line = json.loads(path.read_text())
    assert line["value"] is None and "nan" in line["reason"]


def test_replacing_keeps_only_what_is_given(tmp_path):
    path = tmp_path / "results.jsonl"
    for name in "abc":
        results.append(path, record(name))
    results.replace_all(path, [r for r in results.read(path) if r.id != "b"])
    assert [r.id for r in results.read(path)] == ["a", "c"]
    assert [p.name for p in tmp_path.iterdir()] == ["results.jsonl"]


@pytest.mark.parametrize("fields", [dict(kind="guess"), dict(kind="claim", status="maybe")])
def test_an_unknown_kind_or_status_is_refused(fields):
    with pytest.raises(ValueError, match="must be one of"):
        Record("99_test", "x", value=1.0, **fields)
