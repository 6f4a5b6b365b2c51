from labkit.devices import support
from labkit.devices.inventory import Device, DeviceSet
from labkit.lab.machine_tables import devices_table, support_table, versions_table


def test_the_tables_say_what_one_two_and_four_devices_are_and_may_claim(monkeypatch):
    def two_gpus_else_cpu(requested, count):
        kind, uuid = ("cuda", "GPU-1") if count <= 2 else ("cpu", None)
        return DeviceSet(tuple(Device(kind, i, kind.upper(), uuid) for i in range(count)), 2)

    monkeypatch.setattr(support, "choose_devices", two_gpus_else_cpu)
    one, two, four = devices_table().rows
    assert one == ["1 device", "1 × CUDA", "unknown", "GPU-1", "measured:cuda"]
    assert two[1] == "2 × CUDA"
    assert four == ["4 devices", "4 × CPU", "unknown", "none: it is no GPU", "measured:cpu"]
    clock = next(row for row in support_table().rows if row[0] == "time")
    assert clock[1:3] == ["supported", "supported"] and "share 2 physical cores" in clock[3]


def test_versions_name_every_package_of_the_environment():
    names = [row[0] for row in versions_table().rows]
    for package in ("python", "torch", "jupyterlab", "nvitop", "papermill", "physical cores"):
        assert package in names


def test_a_count_that_the_requested_kind_does_not_have_is_said_not_replaced(monkeypatch):
    def one_gpu(requested, count):
        if count > 1:
            raise ValueError("this machine has 1 of kind cuda")
        return DeviceSet((Device("cuda", 0, "X1"),), 2)

    monkeypatch.setattr(support, "choose_devices", one_gpu)
    assert devices_table("cuda").rows[1][1] == "not here: fewer than 2 of kind cuda"
    assert support_table("cuda").rows[0][1:3] == [
        "supported",
        "not here: fewer than 2 of kind cuda",
    ]
