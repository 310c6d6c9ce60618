"""Which devices are used, and how they are numbered: what ``--devices`` and COLI_DEVICES say, turned into objects.

A card is named by its index, PCI bus id, UUID or a piece of its name; ``fake:8GiB`` makes a card of ordinary memory.
A name that fits no card or more than one is refused with the list of what is here: nothing is guessed.  The order of
the list is the numbering that COLI_PLACE uses.  How a maker's cards are found is that maker's folder's business.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections import deque
from collections.abc import Sequence

from coli.devices.base import Device
from coli.errors import RequestError
from coli.settings import parse_bytes, parse_devices

_PCI = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7]))?", re.IGNORECASE)
_FAKE = "fake:"


def choose_devices(wanted: str | Sequence[int | str | Device] | None = None) -> list[Device]:
    """The devices that a setting names, numbered 0, 1, ... in its order.

    wanted : None or "auto" (every card), "none", the text of ``--devices``, or a list of indexes, PCI ids, UUIDs,
        pieces of names, ``fake:BYTES`` and Device objects.

    Raises RequestError for a name that fits no card, or several, and for a card that is named twice.
    """
    if isinstance(wanted, str):
        try:
            wanted = parse_devices(wanted)
        except ValueError as error:
            raise RequestError(f"devices={wanted!r} is not valid: expected {error}", param="devices") from None
    if wanted == "none":
        return []
    if wanted is None or wanted == "auto":
        return _numbered(_cards())
    chosen: list[Device] = []
    cards: list[Device] | None = None  # asked for only where a card is named: asking may start a driver
    n_fakes = 0
    for item in wanted:
        if isinstance(item, str) and item.lower().startswith(_FAKE):
            device = _fake(item, n_fakes)
            n_fakes += 1
        elif isinstance(item, (int, str)):
            cards = _cards() if cards is None else cards
            device = _find(item, cards)
        else:
            device = item
        if any(device is other for other in chosen):
            raise RequestError(f"devices: {item!r} names {describe(device)} a second time", param="devices")
        chosen.append(device)
    return _numbered(chosen)


def describe(device: Device) -> str:
    """``0 (RTX 3070, GPU-1f2e3d4c-..., 0000:65:00.0)``: index, name and identity of a device, never apart."""
    identity = (device.name, device.uuid, device.pci_bus_id)
    return f"{device.index} ({', '.join(part for part in identity if part)})"


def _numbered(devices: list[Device]) -> list[Device]:
    for index, device in enumerate(devices):
        device.index = index
    return devices


def _cards() -> list[Device]:
    """Every card that can be used here, in the order that nvidia-smi prints; none where coli has no CUDA room."""
    if importlib.util.find_spec("coli.devices.cuda") is None:
        return []
    return importlib.import_module("coli.devices.cuda.probe").list_devices()


def _fake(item: str, number: int) -> Device:
    from coli.devices.fake import FakeDevice  # brings the kernels along

    try:
        free_bytes = parse_bytes(item[len(_FAKE) :])
    except ValueError as error:
        raise RequestError(f"devices: {item!r} is not valid: expected fake: and {error}", param="devices") from None
    device = FakeDevice(free_bytes, name=f"fake{number}")
    device.calls = deque(maxlen=0)  # a rehearsal may last hours; only tests read the record
    return device


def _find(item: int | str, cards: list[Device]) -> Device:
    found = _matches(item, cards)
    if len(found) == 1:
        return found[0]
    if found:
        fitting = ", ".join(describe(card) for card in found)
        raise RequestError(
            f"devices: {item!r} fits {len(found)} cards: {fitting}; name one by its index, PCI id or UUID",
            param="devices",
        )
    here = ", ".join(describe(card) for card in cards) or "no card; fake:8GiB makes one to rehearse with"
    raise RequestError(f"devices: there is no card {item!r}; here: {here}", param="devices")


def _matches(item: int | str, cards: list[Device]) -> list[Device]:
    """The cards that a name fits, by the strictest reading that fits any."""
    if isinstance(item, int) or item.isdecimal():
        return [card for card in cards if card.index == int(item)]
    text = item.lower()
    address = _pci_address(text)
    readings = (
        lambda card: address is not None and card.pci_bus_id and _pci_address(card.pci_bus_id) == address,
        lambda card: card.uuid and text == card.uuid.lower(),
        lambda card: card.uuid and text.startswith(("gpu-", "mig-")) and card.uuid.lower().startswith(text),
        lambda card: text == card.name.lower(),
        lambda card: text in card.name.lower(),
    )
    for fits in readings:
        found = [card for card in cards if fits(card)]
        if found:
            return found
    return []


def _pci_address(text: str) -> tuple[int, ...] | None:
    """(domain, bus, device, function); tools write the domain with four digits, with eight, or leave it out."""
    match = _PCI.fullmatch(text)
    return None if match is None else tuple(int(part or "0", 16) for part in match.groups())
