import os
import re
from html.parser import HTMLParser

import pytest

from labkit.devices.inventory import Device, DeviceSet
from labkit.lab import results
from labkit.lab.headless.comparison import compare
from labkit.lab.headless.report import page, write_report
from labkit.lab.results import Record


def devices(count):
    return DeviceSet(tuple(Device("cpu", i, "a <fast> chip") for i in range(count)), 2).to_json()


def record(kind, name, value, count=1, notebook="01_a", provenance="measured:cpu", **fields):
    return Record(
        notebook,
        name,
        kind,
        value,
        "tokens/s",
        provenance=provenance,
        devices=devices(count),
        preset="tiny",
        versions={"torch": "2.13.0"},
        **fields,
    )


RECORDS = [
    record("measurement", "training tokens/s", 100.0),
    record("measurement", "training tokens/s, naive split", 90.0, 2, "11_b", expected=95.0),
    record("measurement", "training tokens/s, one device", 98.0, 2, "11_b"),
    record("measurement", "training tokens/s, pipeline", 300.0, 4, "20_c", "virtual:a6000"),
    record("measurement", "inference time per token", 0.02, 2, "14_d"),
    record("measurement", "loss", 1.0),
    record("claim", "it <holds>", 1, tolerance={"rel": 0.05}, expected=1.01, status="passed"),
    record(
        "claim",
        "two beat one",
        1.4,
        2,
        status="refused",
        reason="one core",
        tolerance={"at_least": 1.5},
        expected=1.5,
    ),
]


def test_quantities_are_lined_up_by_device_count_with_prediction_and_ratio():
    found = [
        (r.workload, r.quantity, r.variant, r.num_devices, r.measured, r.predicted, r.ratio)
        for r in compare(RECORDS)
    ]
    assert found == [
        ("training", "tokens/s", "", 1, 100.0, None, 1.0),
        ("training", "tokens/s", "one device", 1, 98.0, None, 1.0),
        ("training", "tokens/s", "naive split", 2, 90.0, 95.0, 90 / 98),
        (
            "training",
            "tokens/s",
            "pipeline",
            4,
            300.0,
            None,
            None,
        ),  # virtual: not divided by a real one
        ("inference", "time per token", "", 2, 0.02, None, None),
    ]


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.foreign = []

    def handle_starttag(self, tag, attributes):
        self.foreign += [a for a in attributes if a[0] in ("src", "href")]
        self.foreign += [tag] if tag in ("script", "link") else []


def test_the_page_stands_alone_and_escapes_what_it_shows():
    text = page("tiny-auto", RECORDS, {"01_a": "passed"})
    links = Links()
    links.feed(text)
    assert links.foreign == [] and "url(" not in text
    assert "it &lt;holds&gt;" in text and "<fast>" not in text


def test_the_page_lists_every_claim_with_rule_status_provenance_and_reason():
    text = page("tiny-auto", RECORDS, {"01_a": "passed"})
    assert "Claims: 1 passed, 1 refused, 0 failed" in text
    rows = [re.sub(r"<[^>]+>", "|", row) for row in text.split("<tr>") if "it &lt;holds" in row]
    assert "1.01 tokens/s within 5 %" in rows[0] and "measured:cpu" in rows[0]
    assert "at least 1.5 tokens/s" in text and "one core" in text


def test_a_workload_that_no_notebook_measured_is_said_to_be_missing():
    assert "No notebook of this run measured inference." in page("x", RECORDS[:1], {})


def test_a_notebook_that_broke_is_named_beside_the_claims_that_passed():
    text = page("x", RECORDS, {"01_a": "passed", "11_b": "failed"})
    assert "Not passed: 11_b (failed)" in text
    assert "Run and passed: 01_a." in page("x", RECORDS, {"01_a": "passed"})


def test_the_latest_run_is_reported_unless_one_is_named(tmp_path):
    for number, name in enumerate(("tiny-auto", "tiny-cpu", "interactive")):
        path = tmp_path / name / results.FILE_NAME
        results.append(path, RECORDS[0])
        os.utime(path, (number, number))
    assert write_report(tmp_path) == tmp_path / "tiny-cpu" / "report.html"
    assert write_report(tmp_path, "tiny-auto") == tmp_path / "tiny-auto" / "report.html"
    with pytest.raises(
        ValueError, match="tiny-gone has no results; there are: interactive, tiny-auto, tiny-cpu"
    ):
        write_report(tmp_path, "tiny-gone")
