"""Settings to try on scripted cards of which each knows less than an RTX A6000."""

from __future__ import annotations

from fake_nvml import FakeGPU

from labkit.devices.nvml import physical_gpus
from labkit.devices.tuning.tuning import tuned
from labkit.devices.tuning.tuning_plan import Wish, plan
from labkit.devices.tuning.tuning_wishes import Wishes, clock_wishes, fan_wishes, power_wishes

NO_LIMIT = tuple(
    f"nvmlDeviceGetPowerManagement{what}" for what in ("DefaultLimit", "LimitConstraints", "Limit")
)


def found(gpus, wishes, *cards, **settings) -> Wishes:
    with gpus(*cards):
        return wishes(physical_gpus().devices, **settings)


def test_caps_to_try_are_shares_of_the_default_that_every_card_allows(gpus):
    two = FakeGPU(), FakeGPU(limits_w=(180, 350, 350))
    caps = found(gpus, power_wishes, *two, shares=(0.9, 0.7, 0.5))
    assert caps.to_try == (Wish(power_limit_w=270), Wish(power_limit_w=210))
    (reason,) = caps.left_out
    assert "GPU 1: power_limit_w=150 is outside" in reason and "180 to 350 W" in reason


def test_without_a_card_there_is_nothing_to_try_and_nothing_left_out():
    assert power_wishes([]) == clock_wishes([]) == fan_wishes([]) == Wishes()


def test_a_card_without_a_power_limit_gets_no_cap_and_keeps_its_clocks_to_try(gpus):
    """A laptop's card, or one under WSL."""
    for silent in (NO_LIMIT, NO_LIMIT[:1], NO_LIMIT[1:2], NO_LIMIT[2:]):
        card = FakeGPU(unsupported=silent)
        caps = found(gpus, power_wishes, FakeGPU(), card)
        assert caps.to_try == () and len(caps.left_out) == 1
        assert "GPU 1: nvmlDeviceGetPower" in caps.left_out[0] and "not supp" in caps.left_out[0]
        assert len(found(gpus, clock_wishes, FakeGPU(), card).to_try) == 2


def test_clocks_are_shares_of_what_every_card_can_hold(gpus):
    clocks = found(gpus, clock_wishes, FakeGPU(), FakeGPU())
    assert [wish.clocks_mhz for wish in clocks.to_try] == [(2100, 2100), (1680, 1680)]
    with gpus(FakeGPU()):
        assert plan(physical_gpus().devices, clocks.to_try[1])[0].then == "held at 1680 MHz"
    silent = FakeGPU(unsupported=("nvmlDeviceGetMaxClockInfo",))
    clocks = found(gpus, clock_wishes, FakeGPU(), silent)
    assert clocks.to_try == () and "GPU 1: nvmlDeviceGetMaxClockInfo" in clocks.left_out[0]


def test_fans_are_tried_only_where_every_card_has_some(gpus):
    assert found(gpus, fan_wishes, FakeGPU()).to_try == (Wish(fan_percent=100),)
    for passive in (FakeGPU(unsupported=("nvmlDeviceGetNumFans",)), FakeGPU(fans=0)):
        fans = found(gpus, fan_wishes, FakeGPU(), passive)
        assert fans.to_try == () and "GPU 1" in fans.left_out[0]


def test_a_fan_is_not_asked_to_turn_slower_than_it_does(gpus):
    fans = found(gpus, fan_wishes, FakeGPU(fan=95), percents=(90, 100))
    assert fans.to_try == (Wish(fan_percent=100),)
    assert "fan 0 turns at 95 % now, and a fan is never slowed" in fans.left_out[0]


def test_every_wish_left_to_try_passes_its_dry_run(gpus):
    with gpus(FakeGPU(fan=95, limits_w=(200, 300, 300))):
        devices = physical_gpus().devices
        wishes = power_wishes(devices) + clock_wishes(devices) + fan_wishes(devices)
        for wish in wishes.to_try:
            with tuned(wish, devices) as steps:
                assert steps
    assert [wish.parts for wish in wishes.to_try] == [("power",)] * 2 + [("clocks",)] * 2 + [
        ("fans",)
    ]
    assert len(wishes.left_out) == 1
