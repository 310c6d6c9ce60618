"""coli/devices/choose.py: a name means one card or is refused with the list of what is here."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from coli.devices import choose
from coli.devices.choose import choose_devices, describe
from coli.devices.cuda import probe
from coli.devices.fake import FakeDevice
from coli.errors import RequestError

GIB = 1 << 30


def card(index, name, uuid, pci_bus_id):
    device = FakeDevice(GIB, name=name)
    device.index, device.uuid, device.pci_bus_id = index, uuid, pci_bus_id
    return device


@pytest.fixture
def cards(monkeypatch):
    """Three cards as nvidia-smi lists them."""
    here = [
        card(0, "NVIDIA GeForce RTX 3070", "GPU-aaaa1111-0000-0000-0000-000000000001", "00000000:21:00.0"),
        card(1, "Quadro RTX 4000", "GPU-aaaa2222-0000-0000-0000-000000000002", "00000000:41:00.0"),
        card(2, "NVIDIA H200", "GPU-bbbb3333-0000-0000-0000-000000000003", "00000001:41:00.0"),
    ]
    monkeypatch.setattr(choose, "_cards", lambda: list(here))
    return here


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", [0]),
        ("2,0", [2, 0]),
        ("21:00.0", [0]),
        ("0000:41:00.0", [1]),
        ("00000001:41:00.0", [2]),
        ("0001:41:00", [2]),
        ("GPU-bbbb3333-0000-0000-0000-000000000003", [2]),
        ("gpu-bbbb", [2]),
        ("h200", [2]),
        ("RTX 3070, Quadro", [0, 1]),
        ("auto", [0, 1, 2]),
        (None, [0, 1, 2]),
        ("none", []),
    ],
)
def test_card_is_found_by_index_pci_id_uuid_or_piece_of_its_name(cards, text, expected):
    """Every way to name a card leads to it, in the order of the list."""
    assert [cards[i] for i in expected] == choose_devices(text)


def test_order_of_the_list_is_the_numbering(cards):
    """The index that COLI_PLACE uses is the place in the list; the card keeps its identity."""
    first, second = choose_devices("2,0")
    assert ("NVIDIA H200", 0) == (first.name, first.index)
    assert ("NVIDIA GeForce RTX 3070", 1) == (second.name, second.index)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rtx", "'rtx' fits 2 cards: 0 \\(NVIDIA GeForce RTX 3070, GPU-aaaa1111.*1 \\(Quadro RTX 4000, .*name one by"),
        ("GPU-aaaa", "'GPU-aaaa' fits 2 cards"),
        ("7", "there is no card 7; here: 0 \\(NVIDIA GeForce RTX 3070, .*, 1 \\(.*, 2 \\(NVIDIA H200"),
        ("3070", "there is no card 3070; here: 0"),  # a number is an index, never a piece of a name
        ("22:00.0", "there is no card '22:00.0'; here: 0"),
        ("Radeon", "there is no card 'Radeon'; here: 0"),
        ("0,rtx 3070", "'rtx 3070' names 0 \\(NVIDIA GeForce RTX 3070, .*\\) a second time"),
        ("0,,1", "devices='0,,1' is not valid: expected auto, none, or a list"),
        ("", "is not valid"),
        ("fake:lots", "'fake:lots' is not valid: expected fake: and bytes, such as"),
        ("fake:8GB/s", "is not valid"),
    ],
)
def test_name_that_fits_no_card_or_several_is_one_error(cards, text, message):
    """Nothing is guessed: the error names the item and lists what is here."""
    with pytest.raises(RequestError, match=message) as error:
        choose_devices(text)
    assert "devices" == error.value.param
    assert "\n" not in str(error.value)


def test_fakes_are_numbered_named_and_sized():
    """``fake:SIZE`` makes a card of ordinary memory; two of them are two cards."""
    small, big = choose_devices("fake:512MiB,fake:8GiB")
    assert [("fake0", 0, GIB // 2), ("fake1", 1, 8 * GIB)] == [(d.name, d.index, d.free_bytes()) for d in (small, big)]
    assert "1 (fake1)" == describe(big)


def test_fake_of_a_rehearsal_keeps_no_record():
    """A rehearsal may last hours: its record of calls must not grow."""
    (device,) = choose_devices("fake:1MiB")
    device.open_arena(1024, 0, None)
    assert 0 == len(device.calls)


def test_device_objects_pass_through_and_mix_with_names(cards):
    """A caller's own devices are used as they are and numbered by their place."""
    mine = FakeDevice(GIB, name="mine")
    chosen = choose_devices([1, mine, "fake:1GiB"])
    assert ["Quadro RTX 4000", "mine", "fake0"] == [d.name for d in chosen]
    assert [0, 1, 2] == [d.index for d in chosen]
    assert mine is chosen[1]
    with pytest.raises(RequestError, match="a second time"):
        choose_devices([mine, mine])


def test_cards_are_not_looked_for_where_none_is_named(monkeypatch):
    """Fakes and "none" start no driver."""
    monkeypatch.setattr(choose, "_cards", lambda: pytest.fail("a driver was asked"))
    assert 1 == len(choose_devices("fake:1GiB"))
    assert [] == choose_devices("none")


def test_machine_without_cards_says_so(monkeypatch):
    """auto finds nothing and is content; a named card is an error that shows the way out."""
    monkeypatch.setattr(choose, "_cards", list)
    assert [] == choose_devices("auto")
    with pytest.raises(RequestError, match="there is no card 0; here: no card; fake:8GiB makes one"):
        choose_devices("0")


def test_no_devices_import_nothing_of_cuda():
    """``--devices none`` asks nobody: neither a maker's package nor coli's room for it is imported."""
    code = """
import sys, coli
with coli.load("demo", devices="none", threads=1) as model:
    model.session().step(1)
found = sorted(name for name in sys.modules if name.split(".")[0] in ("cuda", "pynvml") or "devices.cuda" in name)
assert not found, found
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_auto_without_a_card_says_why_once(monkeypatch, caplog):
    """The reason why there is no card is one line, and the run goes on without devices."""
    monkeypatch.setattr("coli.devices.cuda.probe.probe_cuda", lambda: probe.Reason("no NVIDIA driver"))
    with caplog.at_level(logging.INFO, logger="coli"):
        assert choose_devices("auto") == []
    assert [r.getMessage() for r in caplog.records if r.name == "coli.cuda"] == ["off: no NVIDIA driver"]
