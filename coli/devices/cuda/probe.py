"""Which NVIDIA cards can be used here, numbered as nvidia-smi numbers them; or the one reason why there are none.

CUDA numbers cards by speed unless CUDA_DEVICE_ORDER says otherwise, and CUDA_VISIBLE_DEVICES hides and renames them;
NVML (nvidia-ml-py) numbers them as nvidia-smi does.  So the two lists are joined by UUID, and everybody outside
this folder sees NVML's number, one card's name and that card's bytes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coli.log import logger

if TYPE_CHECKING:
    from coli.devices.cuda.device import CudaDevice

MIN_DRIVER = 580  # the first driver of CUDA 13
MIN_CUDA = 13000  # as cuDriverGetVersion says it
MIN_CAPABILITY = (7, 5)  # the oldest that NVRTC 13 compiles for: Turing


class Reason(str):
    """Why there is no card, in half a line."""


@dataclass(frozen=True)
class Card:
    """One usable card.

    index : as nvidia-smi prints it; CUDA's ordinal where NVML does not know the card.
    cuda_ordinal : CUDA's number for it in this process.   free_bytes : None where NVML did not say.
    driver : the driver's version as nvidia-smi prints it; "CUDA 13.0", what it offers, where NVML did not say.
    """

    index: int
    cuda_ordinal: int
    name: str
    uuid: str
    pci_bus_id: str
    total_bytes: int
    free_bytes: int | None
    capability: tuple[int, int]
    driver: str

    @property
    def arch(self) -> str:
        """The architecture that its kernels are compiled for, such as "sm_90"."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


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
    # One order for both sides where the user has none of his own; a value that he set is kept and translated.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    try:
        from cuda.bindings import driver
    except ImportError as error:
        return Reason(f"cuda-python is not installed ({error}); pip install 'coli[cuda]'")
    try:
        code = driver.cuInit(0)[0]
        if code == driver.CUresult.CUDA_ERROR_NO_DEVICE:
            return _no_card()
        if code != driver.CUresult.CUDA_SUCCESS:
            return Reason(f"the NVIDIA driver does not start ({code.name})")
        version = int(driver.cuDriverGetVersion()[1])
    except RuntimeError:  # the bindings raise a kind of it where libcuda is missing
        return Reason("no NVIDIA driver")
    if version < MIN_CUDA:
        return Reason(f"the NVIDIA driver offers {_cuda_text(version)}; driver {MIN_DRIVER} or newer is needed")
    missing = _missing_compiler()
    if missing is not None:
        return missing
    found = _cuda_cards(driver, version)
    usable = [card for card in found if card.capability >= MIN_CAPABILITY]
    for card in found:
        if card not in usable and usable:
            logger("cuda").info("%s (%s) is left out: %s", card.name, card.pci_bus_id, _too_old(card))
    if not found:
        return _no_card()
    return sorted(usable, key=lambda card: card.index) or Reason(f"{found[0].name}: {_too_old(found[0])}")


def _no_card() -> Reason:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return Reason("no card" if visible is None else f"no card with CUDA_VISIBLE_DEVICES={visible!r}")


def _too_old(card: Card) -> str:
    return f"compute capability {card.capability[0]}.{card.capability[1]}, 7.5 is the least that works"


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


def _cuda_cards(driver: Any, version: int) -> list[Card]:
    """What CUDA shows, joined with NVML by UUID.   version : the driver's, as CUDA says it."""
    release, managed = _ask_nvml()
    attribute = driver.CUdevice_attribute
    cards = []
    for ordinal in range(int(driver.cuDeviceGetCount()[1])):
        code, device = driver.cuDeviceGet(ordinal)
        if code != driver.CUresult.CUDA_SUCCESS:
            continue
        uuid = uuid_text(bytes(driver.cuDeviceGetUuid(device)[1].bytes))
        index, free_bytes = managed.get(uuid, (ordinal, None))
        major = driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)[1]
        minor = driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)[1]
        cards.append(
            Card(
                index,
                ordinal,
                _text(driver.cuDeviceGetName(128, device)[1]),
                uuid,
                _text(driver.cuDeviceGetPCIBusId(32, device)[1]).lower(),
                int(driver.cuDeviceTotalMem(device)[1]),
                free_bytes,
                (int(major), int(minor)),
                release or _cuda_text(version),
            )
        )
    return cards


def _ask_nvml() -> tuple[str | None, dict[str, tuple[int, int]]]:
    """The driver's version and {uuid: (index, free bytes)}; None and nothing where NVML cannot be asked."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        logger("cuda").info("nvidia-ml-py is not installed: cards are numbered as CUDA numbers them")
        return None, {}
    except Exception as error:  # NVMLError, or an OSError of its loader; a driver without NVML is still a driver
        logger("cuda").info("NVML does not answer (%s): cards are numbered as CUDA numbers them", error)
        return None, {}
    try:
        release = _text(pynvml.nvmlSystemGetDriverVersion())
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return release, {
            _text(pynvml.nvmlDeviceGetUUID(handle)): (index, int(pynvml.nvmlDeviceGetMemoryInfo(handle).free))
            for index, handle in enumerate(handles)
        }
    except pynvml.NVMLError as error:
        logger("cuda").info("NVML does not answer (%s): cards are numbered as CUDA numbers them", error)
        return None, {}
    finally:
        pynvml.nvmlShutdown()


def nvml_free_bytes(uuid: str) -> int | None:
    """Free bytes of a card as NVML sees them now, without a context; None where it cannot be asked."""
    return _ask_nvml()[1].get(uuid, (0, None))[1]


def _text(value: str | bytes) -> str:
    return value.split(b"\0")[0].decode(errors="replace") if isinstance(value, bytes) else value


def uuid_text(raw: bytes) -> str:
    """The 16 bytes of a CUuuid as NVML writes them."""
    digits = raw.hex()
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
