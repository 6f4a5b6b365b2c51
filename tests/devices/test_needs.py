import pytest

from labkit.devices import needs
from labkit.devices.inventory import Device, DeviceSet
from labkit.devices.needs import (
    Accelerators,
    Cores,
    KnownPeak,
    Package,
    QuietCores,
    Timing,
    Virtual,
    need_from_json,
    need_to_json,
)


def devices(kind, count, cores=2, peak=None):
    return DeviceSet(tuple(Device(kind, i, "X1", peak_flops=peak) for i in range(count)), cores)


@pytest.mark.parametrize(
    "need, found, reason",
    [
        (Timing(2), devices("cpu", 2), None),
        (Timing(2), devices("cuda", 4), None),
        (Timing(2), devices("cuda", 1), "needs 2 devices, this run has 1"),
        (Timing(4), devices("cpu", 4), "4 CPU ranks share 2 physical cores"),
        (Timing(4), devices("cpu", 4, cores=8), None),
        (Accelerators(1), devices("cpu", 1), "uses cpu devices"),
        (Accelerators(2), devices("cuda", 2), None),
        (Accelerators(4), devices("cuda", 2), "needs 4 accelerators, this run has 2"),
        (KnownPeak(), devices("cuda", 1), "no published float32 peak FLOP/s is known for 'X1'"),
        (KnownPeak(), devices("cuda", 1, peak={"float32": 1e12}), None),
        (Virtual(), devices("virtual", 4), None),
        (Virtual(), devices("cuda", 4), "what cuda devices and links cost is not known"),
        (Cores(2), devices("virtual", 4), None),
        (Cores(2), devices("virtual", 4, cores=1), "needs 2 physical cores, this host has 1"),
        (KnownPeak("bfloat16"), devices("cuda", 1, peak={"float32": 1e12}), "bfloat16"),
        (QuietCores(2, 0.01), devices("virtual", 4), None),
        (QuietCores(2, 0.1, most=0.15), devices("virtual", 4), None),
        (QuietCores(2, 0.25), devices("virtual", 4), "kept the ranks from a core for 25%"),
        (QuietCores(2, None), devices("virtual", 4), "does not tell"),
        (QuietCores(2, 0.0), devices("cpu", 2, cores=1), "needs 2 physical cores"),
        (Package("torch"), devices("cpu", 1), None),
        (Package("no_such_package"), devices("cpu", 1), "no_such_package is not installed"),
    ],
)
def test_a_need_is_refused_exactly_where_the_hardware_lacks_it(need, found, reason):
    answer = need.refusal(found)
    assert answer is None if reason is None else reason in answer
    assert need_from_json(need_to_json(need)) == need


def test_an_unknown_need_lists_those_there_are():
    with pytest.raises(ValueError, match="'Magic'.*Timing"):
        need_from_json({"type": "Magic"})


def test_a_claim_about_the_chat_model_is_refused_with_what_is_missing(monkeypatch):
    monkeypatch.setattr(needs, "why_not_pretrained", lambda: "gguf not installed")
    assert needs.PretrainedModel().refusal(devices("cpu", 1)) == "gguf not installed"
