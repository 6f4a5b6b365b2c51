import pytest
import torch

from labkit.lab import results, session
from labkit.lab.claims import claim


def test_running_a_notebook_by_hand_again_replaces_its_records_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "repository_root", lambda: tmp_path)
    for notebook in ("98_other", "99_test", "99_test"):
        lab = session.start(notebook, devices="cpu")
        claim("x", measured=1, equals=1)
    assert lab.folder == tmp_path / "build" / "interactive"
    found = [r.notebook for r in results.read(lab.folder / "results.jsonl")]
    assert found == ["98_other", "99_test"]


def test_an_unknown_preset_lists_those_there_are(tmp_path):
    with pytest.raises(ValueError, match="preset='big'.*tiny, workshop, workstation"):
        session.start("99_test", preset="big", devices="cpu", run=str(tmp_path))


def test_the_lab_shows_what_it_runs_on(tmp_path):
    lab = session.start("99_test", devices="cpu", count=2, run=str(tmp_path))
    assert repr(lab).startswith("99_test on 2 × ") and repr(lab).endswith("measured:cpu")


def test_one_cpu_device_is_one_core(tmp_path):
    threads = torch.get_num_threads()
    try:
        lab = session.start("99_test", devices="cpu", count=2, run=str(tmp_path))
        assert lab.bind(1) == torch.device("cpu") and torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("wall_clock, kind", [(False, "virtual"), (True, "cpu")])
def test_a_notebook_about_measured_time_never_runs_on_virtual_gpus(tmp_path, wall_clock, kind):
    lab = session.start("99_test", devices="virtual", run=str(tmp_path), wall_clock=wall_clock)
    assert lab.devices.kind == kind
