from labkit.devices import support
from labkit.devices.inventory import Device, DeviceSet
from labkit.devices.support import support_for


def test_four_cpu_ranks_on_two_cores_may_claim_numbers_but_no_time(monkeypatch):
    four = DeviceSet(tuple(Device("cpu", i, "X1") for i in range(4)), physical_cores=2)
    monkeypatch.setattr(support, "choose_devices", lambda requested, count: four)
    refusals = support_for(4).refusals
    assert refusals["numbers and gradients"] is None
    assert "4 CPU ranks share 2 physical cores" in refusals["time"]
    assert "no published float32 peak" in refusals["MFU"]
