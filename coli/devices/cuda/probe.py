"""The NVIDIA cards of this machine, numbered as nvidia-smi numbers them, each with the reason why it cannot be used.

CUDA numbers cards by speed unless CUDA_DEVICE_ORDER says otherwise, and CUDA_VISIBLE_DEVICES hides and renames them;
NVML (nvidia-ml-py) numbers them as nvidia-smi does.  So the two lists are joined by UUID, and everybody outside
this folder sees NVML's number, one card's name and that card's bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from coli.log import logger

if TYPE_CHECKING:
    from coli.devices.cuda.device import CudaDevice

MIN_DRIVER = 580  # the first driver of CUDA 13
MIN_CUDA = 13000  # as cuDriverGetVersion says it
MIN_CAPABILITY = (7, 5)  # the oldest that NVRTC 13 compiles for: Turing


class Reason(str):
    """Why a card, or every card, is not used: half a line; behind the last "; " what to do, where that is known."""


@dataclass(frozen=True)
class Card:
    """One card, usable where it has no ``reason``.

    index : as nvidia-smi prints it; CUDA's ordinal where NVML does not know the card.
    cuda_ordinal : CUDA's number for it in this process; None where CUDA does not show it.
    free_bytes : None where NVML did not say.
    driver : the driver's version as nvidia-smi prints it; "CUDA 13.0", what it offers, where NVML did not say.
    """

    index: int
    cuda_ordinal: int | None
    name: str
    uuid: str
    pci_bus_id: str
    total_bytes: int
    free_bytes: int | None
    capability: tuple[int, int]
    driver: str
    reason: Reason | None = None

    @property
    def arch(self) -> str:
        """The architecture that its kernels are compiled for, such as "sm_90"."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


@dataclass(frozen=True)
class Survey:
    """All cards by index, usable or not.

    reason : why none can be used; None where one can.
    nvml_reason : why NVML could not be asked, so that cards have CUDA's numbers; None where it answered.
    """

    cards: tuple[Card, ...]
    reason: Reason | None
    nvml_reason: Reason | None


def list_devices() -> list[CudaDevice]:
    """Every usable card as a device that is not opened yet, in nvidia-smi's order.  Says why where there is none."""
    cards = probe_cuda()
    if isinstance(cards, Reason):
        logger("cuda").info("off: %s", cards)
        return []
    from coli.devices.cuda.device import CudaDevice

    return [CudaDevice(card) for card in cards]


def probe_cuda() -> list[Card] | Reason:
    """The usable cards by index, or why there are none.  Makes no context."""
    found = survey()
    if found.reason is not None:
        return found.reason
    log = logger("cuda")
    if found.nvml_reason is not None:
        log.info("%s: what it does not list is numbered as CUDA numbers it", found.nvml_reason)
    for card in found.cards:
        if card.reason is not None and card.cuda_ordinal is not None:  # what the user has hidden is no news to him
            log.info("%s (%s) is left out: %s", card.name, card.pci_bus_id, card.reason)
    return [card for card in found.cards if card.reason is None]


def survey() -> Survey:
    """Every card that NVML or CUDA lists.  Makes no context, raises nothing."""
    # One order for both sides where the user has none of his own; a value that he set is kept and translated.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    managed, nvml_reason = _ask_nvml()
    shown, cuda_reason = _ask_cuda(has_driver=bool(managed))
    unseen = {card.uuid: card for card in managed}
    cards = []
    for card in shown:
        known = unseen.pop(card.uuid, None)
        if known is not None:
            card = replace(card, index=known.index, free_bytes=known.free_bytes, driver=known.driver)
        cards.append(replace(card, reason=cuda_reason or _too_old(card)))
    hidden = cuda_reason or Reason(f"CUDA does not show it{_visible()}")
    cards += [replace(card, reason=hidden) for card in unseen.values()]
    reason = None
    if all(card.reason is not None for card in cards):
        old = next((card for card in cards if card.cuda_ordinal is not None), None)
        reason = cuda_reason or Reason(f"no card{_visible()}" if old is None else f"{old.name}: {old.reason}")
    return Survey(tuple(sorted(cards, key=lambda card: card.index)), reason, nvml_reason)


def nvml_free_bytes(uuid: str) -> int | None:
    """Free bytes of a card as NVML sees them now, without a context; None where it cannot be asked."""
    return next((card.free_bytes for card in _ask_nvml()[0] if card.uuid == uuid), None)


def _visible() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible!r}"


def _too_old(card: Card) -> Reason | None:
    if card.capability >= MIN_CAPABILITY:
        return None
    return Reason(f"compute capability {card.capability[0]}.{card.capability[1]}, 7.5 is the least that works")


# ---- NVML ------------------------------------------------------------------------------------------------


def _ask_nvml() -> tuple[list[Card], Reason | None]:
    """The cards as NVML knows them, without CUDA's numbers; and why one is missing, or why it cannot be asked."""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            driver = _text(pynvml.nvmlSystemGetDriverVersion())
            cards, reason = [], None
            for index in range(pynvml.nvmlDeviceGetCount()):
                try:
                    cards.append(_nvml_card(pynvml, index, driver))
                except Exception as error:  # one card that is lost is no reason to number the others anew
                    reason = Reason(f"NVML does not describe card {index} ({error})")
            return cards, reason
        finally:
            pynvml.nvmlShutdown()
    except ImportError:
        return [], Reason("nvidia-ml-py is not installed")
    except Exception as error:  # NVMLError, or an OSError of its loader; a driver without NVML is still a driver
        return [], Reason(f"NVML does not answer ({error})")


def _nvml_card(pynvml: Any, index: int, driver: str) -> Card:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    domain, _, address = _text(pynvml.nvmlDeviceGetPciInfo(handle).busId).lower().partition(":")
    return Card(
        index,
        None,
        _text(pynvml.nvmlDeviceGetName(handle)),
        _text(pynvml.nvmlDeviceGetUUID(handle)),
        f"{int(domain, 16):04x}:{address}",  # CUDA writes four digits, NVML eight
        int(memory.total),
        int(memory.free),
        tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
        driver,
    )


# ---- CUDA ------------------------------------------------------------------------------------------------


class _Refused(Exception):
    """A call of the driver did not succeed; the name of its code."""


def _ask_cuda(has_driver: bool) -> tuple[list[Card], Reason | None]:
    """The cards that CUDA shows, by its own numbers and without free bytes; and why none of them can be used.

    has_driver : NVML has found cards, so that a missing library is not a missing driver.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        return [], Reason(f"cuda-python is not installed ({error}); pip install 'coli[cuda]'")
    try:
        code = driver.cuInit(0)[0]
        if code == driver.CUresult.CUDA_ERROR_NO_DEVICE:
            return [], None
        if code != driver.CUresult.CUDA_SUCCESS:
            return [], Reason(f"the NVIDIA driver does not start ({code.name}); nvidia-smi may say why")
        version = int(_value(driver, driver.cuDriverGetVersion()))
        if version < MIN_CUDA:
            offered = _cuda_text(version)
            return [], Reason(f"the NVIDIA driver offers {offered}; driver {MIN_DRIVER} or newer is needed")
        return list(_cuda_cards(driver, version)), _missing_compiler()
    except _Refused as refused:
        return [], Reason(f"the NVIDIA driver does not list its cards ({refused}); nvidia-smi may say why")
    except RuntimeError:  # the bindings raise a kind of it where libcuda is missing
        if has_driver:
            return [], Reason("there is no libcuda; a container needs NVIDIA_DRIVER_CAPABILITIES=compute,utility")
        return [], Reason("no NVIDIA driver")


def _cuda_cards(driver: Any, version: int) -> Iterator[Card]:
    """Every card whose queries succeed.   version : the driver's, as CUDA says it."""
    for ordinal in range(int(_value(driver, driver.cuDeviceGetCount()))):
        try:
            yield _cuda_card(driver, ordinal, version)
        except _Refused as refused:
            logger("cuda").info("CUDA's card %d does not say what it is (%s)", ordinal, refused)


def _cuda_card(driver: Any, ordinal: int, version: int) -> Card:
    attribute = driver.CUdevice_attribute
    device = _value(driver, driver.cuDeviceGet(ordinal))
    major, minor = (
        int(_value(driver, driver.cuDeviceGetAttribute(which, device)))
        for which in (
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    return Card(
        ordinal,
        ordinal,
        _text(_value(driver, driver.cuDeviceGetName(128, device))),
        uuid_text(bytes(_value(driver, driver.cuDeviceGetUuid(device)).bytes)),
        _text(_value(driver, driver.cuDeviceGetPCIBusId(32, device))).lower(),
        int(_value(driver, driver.cuDeviceTotalMem(device))),
        None,
        (major, minor),
        _cuda_text(version),
    )


def _value(driver: Any, answer: tuple[Any, Any]) -> Any:
    """The value of a (code, value) of the driver's.  Raises _Refused."""
    code, value = answer
    if code != driver.CUresult.CUDA_SUCCESS:
        raise _Refused(code.name)
    return value


def _missing_compiler() -> Reason | None:
    try:
        import cuda.core  # noqa: F401
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except ImportError as error:
        return Reason(f"cuda-core is not installed ({error}); pip install 'coli[cuda]'")
    except RuntimeError:
        return Reason("NVRTC is not installed; pip install nvidia-cuda-nvrtc")
    return None


def _cuda_text(version: int) -> str:
    """What cuDriverGetVersion says, for people."""
    return f"CUDA {version // 1000}.{version % 1000 // 10}"


# ---- both ------------------------------------------------------------------------------------------------


def _text(value: str | bytes) -> str:
    return value.split(b"\0")[0].decode(errors="replace") if isinstance(value, bytes) else value


def uuid_text(raw: bytes) -> str:
    """The 16 bytes of a CUuuid as NVML writes them."""
    digits = raw.hex()
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
