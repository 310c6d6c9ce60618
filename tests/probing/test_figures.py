"""coli.probing.figures and store: what is measured once is used again, and only for what it was measured of."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from probing.timed import TimedCard

import coli
from coli.devices.base import DeviceError
from coli.devices.cuda.device import CudaDevice
from coli.devices.cuda.probe import Card
from coli.placement import CpuSpeeds, Probe, SpanSpeed, Speed, Speeds
from coli.probing import cards, figures, forget, host, machine_figures, store

CARD = Speeds(Speed(900, 9), Speed(500, 12), SpanSpeed(30, 45, 11, 16, 80))


@pytest.fixture
def measured_cards(monkeypatch):
    """The names of the cards that were measured; each gets the same figures."""
    names = []

    def measure_card(device, beside, cpu):
        names.append(device.name)
        if device.name == "broken":
            raise DeviceError("broken: a kernel trapped", "launch")
        return CARD, 8.0, 0.5

    monkeypatch.setattr(cards, "measure_card", measure_card)
    return names


def card(name: str = "A", uuid: str | None = "GPU-1") -> TimedCard:
    return TimedCard(name=name, uuid=uuid)


def test_figures_are_measured_once_and_kept(measured_cpus, measured_cards, own_cache, caplog):
    """The second process finds files: same figures, nothing measured; each is a [probe] line."""
    caplog.set_level("INFO")
    first = machine_figures([card(), card("B", "GPU-2")], 2)
    assert Probe(CpuSpeeds(Speed(40), Speed(30), 2.0, 5.0, 25.0), (CARD, CARD)) == first
    figures._of_objects.clear()  # another process
    assert first == machine_figures([card(), card("B", "GPU-2")], 2)
    assert ([2], ["A", "B"]) == (measured_cpus, measured_cards)
    assert 3 == len(list(own_cache.glob("*.json")))
    machine_figures([card()], 2)
    lines = [record.message for record in caplog.records if record.name == "coli.probe"]
    assert any("matrices 40.0 GB/s" in line and "measured in" in line for line in lines)
    assert any("a matrix 9.0 us + bytes / 900.0 GB/s" in line and line.endswith("(kept)") for line in lines)


def test_figures_of_another_team_driver_or_version_are_measured_anew(measured_cpus, measured_cards, monkeypatch):
    """What changes what a step takes is part of the fingerprint."""
    machine_figures([card()], 2)
    machine_figures([], 3)
    updated = card()
    updated.driver = "590.1"
    machine_figures([updated], 2)
    monkeypatch.setattr(coli, "__version__", "9.9")
    machine_figures([card()], 2)
    assert ([2, 3, 2], ["A", "A", "A"]) == (measured_cpus, measured_cards)


def test_driver_update_voids_the_figures_of_a_card(measured_cpus, measured_cards):
    """Another driver brings other launches and copies: what was kept of the card is not asked for any more."""
    kept = Card(0, 0, "H", "GPU-7", "0000:01:00.0", 1 << 30, None, (9, 0), driver="580.65.06")
    updated = replace(kept, driver="580.95.05")
    for one, measured in ((kept, 1), (kept, 1), (updated, 2), (updated, 2), (kept, 2)):
        assert machine_figures([CudaDevice(one)], 2) is not None
        assert measured == len(measured_cards)


def test_card_beside_another_team_or_other_figures_of_the_cpu_is_measured_anew(
    measured_cpus, measured_cards, monkeypatch
):
    """What the host takes is in a card's figures: the same object, in the same process."""
    one = card()
    assert machine_figures([one], 2) == machine_figures([one], 2)
    machine_figures([one], 1)
    machine_figures([one], 2, [0, 1])
    assert ["A", "A", "A"] == measured_cards
    monkeypatch.setattr(host, "measure_cpu", lambda beside: (CpuSpeeds(Speed(41), Speed(30)), 45.0))
    for path in store.folder().glob("cpu-*.json"):
        path.unlink()
    machine_figures([one], 2)
    assert 4 == len(measured_cards)


def test_figures_of_a_device_without_identity_are_asked_for_or_there_are_none(measured_cpus, measured_cards, own_cache):
    """A fake card is measured where time is asked for, known as long as it lives, and never kept."""
    fake = card("fake0", None)
    assert machine_figures([fake], 2) is None
    found = machine_figures([fake], 2, anyway=True)
    assert found is not None and found == machine_figures([fake], 2)
    assert machine_figures([card("fake0", None)], 2) is None
    assert ["fake0"] == measured_cards
    assert 1 == len(list(own_cache.glob("*.json"))), "the CPU's"


def test_forget_measures_everything_anew(measured_cpus, measured_cards):
    """--reprobe: CPU and cards, in this process too."""
    one = card()
    machine_figures([one], 2)
    forget()
    machine_figures([one], 2)
    assert ([2, 2], ["A", "A"]) == (measured_cpus, measured_cards)


def without(fields: dict, *names: str) -> dict:
    """The fields but one."""
    inner = fields
    for name in names[:-1]:
        inner = inner[name]
    del inner[names[-1]]
    return fields


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "{",
        lambda text: "[]",
        lambda text: json.dumps(json.loads(text) | {"of": {"kind": "card", "uuid": "GPU-9"}}),
        lambda text: json.dumps(json.loads(text) | {"figures": {}}),
        lambda text: text.replace('"cut_us"', '"other_us"'),
        lambda text: json.dumps(without(json.loads(text), "figures", "host_us")),
        lambda text: json.dumps(without(json.loads(text), "figures", "span", "head_gb_s")),
        lambda text: text.replace("900", "-1"),
        lambda text: text.replace("900", '"fast"'),
        lambda text: text.replace("900", "true"),
        lambda text: text.replace("900", "9" * 400),
        lambda text: "[" * 100_000,
    ],
)
def test_file_that_is_damaged_or_of_something_else_is_one_line_and_measured_anew(
    measured_cpus, measured_cards, own_cache, caplog, change
):
    """Never a traceback, never somebody else's figures."""
    machine_figures([card()], 2)
    figures._of_objects.clear()
    (path,) = own_cache.glob("card-*.json")
    path.write_text(change(path.read_text()))
    caplog.clear()
    machine_figures([card()], 2)
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert 1 == len(warnings) and str(path) in warnings[0] and "measured anew" in warnings[0]
    assert ["A", "A"] == measured_cards
    assert store.load(json.loads(path.read_text())["of"]) == CARD, "what was measured has replaced it"


def test_figures_of_an_older_version_are_measured_anew_without_a_warning(
    measured_cpus, measured_cards, own_cache, caplog
):
    """An update of coli is nobody's fault."""
    machine_figures([card()], 2)
    figures._of_objects.clear()
    (path,) = own_cache.glob("card-*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 0}))
    machine_figures([card()], 2)
    assert ["A", "A"] == measured_cards
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_forget_says_what_it_cannot_remove(measured_cpus, measured_cards, own_cache, caplog):
    """A folder where a file should be: one warning, and everything is measured anew all the same."""
    own_cache.mkdir(parents=True)
    (own_cache / "cpu-0.json").mkdir()
    forget()
    assert "cannot be removed" in caplog.text
    assert machine_figures([card()], 2) is not None


def test_card_that_cannot_be_measured_is_one_line_and_no_figures(measured_cpus, measured_cards, caplog):
    """A plan then counts in bytes."""
    assert machine_figures([card("broken", "GPU-3")], 2) is None
    assert "device 0 (broken) was not measured: broken: a kernel trapped" in caplog.text


def test_cache_that_cannot_be_written_is_one_line(measured_cpus, measured_cards, own_cache, caplog):
    """The figures are used all the same."""
    own_cache.parent.mkdir(parents=True)
    own_cache.write_text("a file where a folder should be")
    assert machine_figures([card()], 2) is not None
    assert "cannot be written" in caplog.text
