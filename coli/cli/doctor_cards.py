"""The NVIDIA cards as `coli doctor` lists them: NVML's order and CUDA's, joined by UUID.

NVML (nvidia-ml-py) numbers cards by PCI address, CUDA by speed unless CUDA_DEVICE_ORDER says otherwise, so an index
without its owner means nothing.  Both are asked late and may be missing; the reason is then a finding, not an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

MIN_DRIVER = 580  # the first driver of CUDA 13
MIN_CAPABILITY = (7, 5)  # the oldest that NVRTC 13 compiles for: Turing

_PACKAGES = ("cuda-python", "cuda-bindings", "cuda-core", "nvidia-cuda-nvrtc", "nvidia-ml-py")


@dataclass(frozen=True)
class Card:
    """One card.  ``cuda_ordinal`` is None where CUDA does not list it (hidden, or CUDA is not installed)."""

    nvml_index: int
    name: str
    uuid: str
    pci_bus_id: str
    total_bytes: int
    free_bytes: int
    driver: str
    capability: tuple[int, int]
    cuda_ordinal: int | None = None

    def __str__(self) -> str:
        ordinal = "-" if self.cuda_ordinal is None else self.cuda_ordinal
        capability = ".".join(map(str, self.capability))
        free, total = (n_bytes / (1 << 30) for n_bytes in (self.free_bytes, self.total_bytes))
        return (
            f"NVML {self.nvml_index}, CUDA {ordinal}: {self.name}, {self.uuid}, {self.pci_bus_id}, "
            f"{free:.1f} of {total:.1f} GiB free, driver {self.driver}, capability {capability}"
        )


def list_cards() -> tuple[list[Card], str | None]:
    """All cards by NVML index, each with its CUDA ordinal; or none and why."""
    try:
        import pynvml
    except ImportError:
        return [], "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [], f"no NVIDIA driver answers ({error})"
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        cards = [_card(pynvml, index, driver) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        return [], f"NVML stopped answering ({error})"
    finally:
        pynvml.nvmlShutdown()
    ordinals = {uuid: ordinal for ordinal, uuid in enumerate(cuda_order()[0])}
    return [replace(card, cuda_ordinal=ordinals.get(card.uuid)) for card in cards], None if cards else "no card"


def cuda_order() -> tuple[list[str], str | None]:
    """UUIDs in the order in which CUDA numbers the cards in this environment; or none and why."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return [], "cuda-python is not installed"
    try:
        (code,) = driver.cuInit(0)
        if code != driver.CUresult.CUDA_SUCCESS:
            return [], f"CUDA does not start ({code.name})"
        _, count = driver.cuDeviceGetCount()
        uuids = []
        for ordinal in range(count):
            _, device = driver.cuDeviceGet(ordinal)
            uuids.append(_uuid_text(bytes(driver.cuDeviceGetUuid(device)[1].bytes)))
    except RuntimeError:  # the bindings raise a kind of it where there is no driver library
        return [], "CUDA finds no driver library"
    return uuids, None


def cuda_packages() -> dict[str, str | None]:
    """Installed version of each package of the extra ``cuda``, None where one is missing."""
    versions: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def card_findings(cards: list[Card], packages: dict[str, str | None]) -> list[tuple[str, str]]:
    """(finding, advice) for what keeps a card from being used, and for an order that misleads."""
    found = []
    missing = [name for name in ("cuda-bindings", "cuda-core", "nvidia-cuda-nvrtc") if packages.get(name) is None]
    if cards and missing:
        found.append((f"{', '.join(missing)} not installed, so no card is used", "pip install 'coli[cuda]'"))
    if cards and int(cards[0].driver.split(".")[0]) < MIN_DRIVER:
        found.append((f"driver {cards[0].driver} is older than CUDA 13 needs", f"install driver {MIN_DRIVER} or newer"))
    for card in cards:
        if card.capability < MIN_CAPABILITY:
            capability = ".".join(map(str, card.capability))
            found.append((
                f"{card.name} ({card.pci_bus_id}) has compute capability {capability}, 7.5 is the least that works",
                "it is left out; nothing to do",
            ))  # fmt: skip
    seen = [card for card in cards if card.cuda_ordinal is not None]
    if any(card.cuda_ordinal != card.nvml_index for card in seen):
        found.append((
            "CUDA and nvidia-smi number the cards differently",
            "name a card by UUID or PCI address (--devices GPU-...), or use the numbers that coli plan prints",
        ))  # fmt: skip
    hidden = [card.name for card in cards if card.cuda_ordinal is None] if seen else []
    if hidden:
        found.append((f"CUDA does not show {', '.join(hidden)}", "check CUDA_VISIBLE_DEVICES"))
    return found


def _card(pynvml: Any, index: int, driver: str) -> Card:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return Card(
        index,
        _text(pynvml.nvmlDeviceGetName(handle)),
        _text(pynvml.nvmlDeviceGetUUID(handle)),
        _text(pynvml.nvmlDeviceGetPciInfo(handle).busId),
        int(memory.total),
        int(memory.free),
        driver,
        tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
    )


def _text(value: str | bytes) -> str:
    """Older releases of nvidia-ml-py answer in bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _uuid_text(raw: bytes) -> str:
    """The 16 bytes of a CUuuid as NVML writes them."""
    digits = raw.hex()
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
