"""The NVIDIA cards as `coli doctor` tells them: a line for each, and what keeps one from being used.

What there is and why is `coli.devices.cuda.probe`'s to find out, so that both mean the same by a card's number.
"""

from __future__ import annotations

from importlib import metadata

from coli.devices.cuda.probe import Card, Reason, Survey

_PACKAGES = ("cuda-python", "cuda-bindings", "cuda-core", "nvidia-cuda-nvrtc", "nvidia-ml-py")
_BY_NAME = "name a card by UUID or PCI address (--devices GPU-...), or use the numbers that coli plan prints"


def card_line(card: Card) -> str:
    """Number, name and identity of a card, its memory and driver, and whether it is usable."""
    ordinal = "-" if card.cuda_ordinal is None else card.cuda_ordinal
    free, total = (_gib(n_bytes) for n_bytes in (card.free_bytes, card.total_bytes))
    return (
        f"{card.index} (CUDA {ordinal}): {card.name}, {card.uuid}, {card.pci_bus_id}, {free} of {total} GiB free, "
        f"driver {card.driver}, capability {'.'.join(map(str, card.capability))}; {card.reason or 'usable'}"
    )


def cuda_packages() -> dict[str, str | None]:
    """Installed version of each package of the extra ``cuda``, None where one is missing."""
    versions: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def card_findings(found: Survey) -> list[tuple[str, str]]:
    """(finding, advice) for what keeps cards from being used, once a reason, and for numbers that mislead."""
    findings = []
    left_out: dict[Reason, list[str]] = {}
    for card in found.cards:
        if card.reason is not None:
            left_out.setdefault(card.reason, []).append(f"{card.name} ({card.pci_bus_id})")
    for reason, names in left_out.items():
        text, _, advice = reason.rpartition("; ") if "; " in reason else (reason, "", "coli goes on without it")
        findings.append((f"not used: {', '.join(names)}: {text}", advice))
    if any(card.cuda_ordinal not in (None, card.index) for card in found.cards):
        findings.append(("CUDA and nvidia-smi number the cards differently", _BY_NAME))
    if found.nvml_reason is not None and found.cards:
        findings.append((f"{found.nvml_reason}: cards have CUDA's numbers, not nvidia-smi's", _BY_NAME))
    return findings


def _gib(n_bytes: int | None) -> str:
    return "?" if n_bytes is None else f"{n_bytes / (1 << 30):.1f}"
