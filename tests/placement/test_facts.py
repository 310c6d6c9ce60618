"""coli.placement.facts and speeds: what is known of a machine."""

from __future__ import annotations

import pytest

from coli.errors import PlacementError
from coli.placement import CpuFacts, CpuSpeeds, DeviceFacts, Probe, Speed, Speeds, default_reserve_bytes, device_label
from coli.placement.speeds import ROUND_TRIP_US, speeds_of


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("free_bytes", -1),
        ("free_bytes", "8GiB"),
        ("free_bytes", 1.5),
        ("free_bytes", float("nan")),
        ("reserve_bytes", -1),
        ("gb_s", 0),
        ("gb_s", float("inf")),
        ("latency_us", -1.0),
        ("latency_us", "10"),
    ],
)
def test_device_facts_that_cannot_be_name_device_and_field(field, value):
    """A wrong number is refused where it is given."""
    with pytest.raises(PlacementError, match=f"card: {field} is"):
        DeviceFacts(**({"name": "card", "free_bytes": 5} | {field: value}))


def test_device_facts_take_whole_floats():
    """6.5 * 2**30 is a number of bytes."""
    assert 6_979_321_856 == DeviceFacts("a", 6.5 * 2**30).free_bytes


@pytest.mark.parametrize("arguments", [{"gb_s": 0}, {"gb_s": -4.0}, {"free_bytes": -1}])
def test_cpu_facts_that_cannot_be_are_refused(arguments):
    """The host's numbers are checked like a card's."""
    with pytest.raises(PlacementError, match="the CPU"):
        CpuFacts(**arguments)


def test_default_reserve_is_512_mib_or_a_sixteenth():
    """A large card keeps 512 MiB free, a small one its share."""
    assert 512 << 20 == default_reserve_bytes(24 << 30) == default_reserve_bytes(8 << 30)
    assert 4 << 20 == default_reserve_bytes(64 << 20)
    assert 0 == default_reserve_bytes(0)


def test_label_has_index_name_and_identity_of_one_card():
    """The UUID where it is known, else the PCI address, else the name alone."""
    assert "1 (RTX, GPU-1f2e3d4c)" == device_label(1, DeviceFacts("RTX", 1, uuid="GPU-1f2e3d4c-9999", pci_bus_id="x"))
    assert "0 (RTX, 0000:65:00.0)" == device_label(0, DeviceFacts("RTX", 1, pci_bus_id="0000:65:00.0"))
    assert "2 (RTX)" == device_label(2, DeviceFacts("RTX", 1))


def test_speeds_of_facts_assume_a_round_trip_where_none_is_given():
    """A bandwidth alone is enough; a latency of 0 is believed."""
    devices = [DeviceFacts("a", 1, gb_s=400), DeviceFacts("b", 1, gb_s=300, latency_us=0)]
    found = speeds_of(devices, CpuFacts(40), None)
    assert [ROUND_TRIP_US, 0] == [device.matrix.latency_us for device in found.devices]
    assert 40 == found.cpu.experts.gb_s
    assert speeds_of(devices, None, None) is None
    assert speeds_of(devices, CpuFacts(), None) is None


def test_speeds_of_a_probe_are_the_probes():
    """What was measured wins over what was said."""
    probe = Probe(CpuSpeeds(Speed(30), Speed(25)), (Speeds(Speed(400, 9), Speed(200, 11)),))
    assert probe == speeds_of([DeviceFacts("a", 1, gb_s=1)], CpuFacts(1), probe)


def test_speed_is_latency_plus_bytes_over_bandwidth():
    """1 MB at 100 GB/s is 10 us, after the latency."""
    assert 15.0 == pytest.approx(Speed(100, 5).us(1e6))
    with pytest.raises(PlacementError):
        Speed(0)
    with pytest.raises(PlacementError):
        Speed(10, -1)
