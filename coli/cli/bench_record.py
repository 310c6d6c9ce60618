"""Records of ``coli bench``: what was measured, on what, with which settings; and how two of them differ."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from coli.errors import ModelError

if TYPE_CHECKING:
    from coli.model import Model

RECORD_VERSION = 1
# Settings that can change a figure; never one that holds a secret.
_RECORDED = ("place", "devices", "vram", "heat", "threads", "context", "isa")


def model_record(
    model: Model, prompt_tokens: int, decode_tokens: int, repeats: int, given: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Measure prefill, decode and the share of the memory's bandwidth; say all that could change the figures.

    given : settings that flags have set, by name; the others are the environment's or the defaults.
    Every repeat starts from an empty state, so no prompt token comes from an earlier one; loading and the first,
    unmeasured repeat are outside the numbers.
    """
    import time

    import numpy as np

    import coli
    from coli import settings
    from coli.engine.benchmarks import decode_bench
    from coli.threads.limits import local_machine

    rng, prefill, decode = np.random.default_rng(0), [], []
    for turn in range(repeats + 1):
        ids, session = rng.integers(0, model.config.vocab_size, prompt_tokens), model.session()
        start = time.perf_counter()
        logits = session.prefill(ids)
        middle = time.perf_counter()
        for _ in range(decode_tokens):
            logits = session.step(int(np.argmax(logits)))
        end = time.perf_counter()
        session.close()
        if turn:
            prefill.append(middle - start)
            decode.append(end - middle)
    steps = max(repeats, 5)
    row = decode_bench(model.engine, position=max(1, min(16, model.context - 2 * steps - 2))).measure(steps)
    stats, (topology, limits) = model.stats(), local_machine()
    return {
        "record": RECORD_VERSION,
        "version": coli.__version__,
        "model": {"name": model.folder.name, "hash": model_hash(model.folder)},
        "settings": {name: str(settings.get(name, (given or {}).get(name))) for name in _RECORDED}
        | {"prompt_tokens": str(prompt_tokens), "decode_tokens": str(decode_tokens), "repeats": str(repeats)},
        "place": stats["place"],
        "devices": stats.get("devices", []),
        "isa": stats["isa"],
        "threads": stats["threads"],
        "thread_map": stats["thread_map"],
        "machine": {
            "cpu": topology.model_name,
            "system": platform.platform(),
            "cpus": len(topology.cpus),
            "allowed": sorted(limits.allowed),
            "quota_cpus": limits.quota_cpus,
        },
        "results": {
            "prefill": {
                "tok_s": prompt_tokens / median(prefill),
                "tokens": prompt_tokens,
                "cached_tokens": 0,
                "repeats": repeats,
                "seconds": prefill,
            },
            "decode": {
                "tok_s": decode_tokens / median(decode),
                "tokens": decode_tokens,
                "repeats": repeats,
                "seconds": decode,
                **{key: asdict(row)[key] for key in ("gb_s", "read_gb_s", "ratio", "n_bytes")},
                "last_caches_bytes": topology.last_caches_bytes,
            },
        },
    }


def model_hash(folder: Path) -> str:
    """A hash of the manifest, which holds a checksum of every file."""
    return hashlib.sha256((folder / "coli.json").read_bytes()).hexdigest()[:16]


def read_record(path: str) -> dict[str, Any]:
    """A record written by ``coli bench --json``.  ModelError names the file."""
    try:
        record = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: no record of coli bench --json ({error})") from None
    if not isinstance(record, dict) or record.get("record") != RECORD_VERSION or "results" not in record:
        raise ModelError(f"{path}: no record of coli bench MODEL --json, or one of another version")
    return record


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{prefix}.{key}" if prefix else key).items()}


def compare(old: dict[str, Any], new: dict[str, Any]) -> str:
    """What differs between two records: first what was set and where it ran, then the figures."""
    a, b = (_flat({k: v for k, v in record.items() if k != "results"}) for record in (old, new))
    lines = [f"{key}: {a.get(key)} -> {b.get(key)}" for key in sorted(a | b) if a.get(key) != b.get(key)]
    if not lines:
        lines = ["same settings, model and machine"]
    for name in old["results"]:
        before, after = old["results"][name], new["results"].get(name)
        if after is None:
            lines.append(f"{name}: {before['tok_s']:.1f} tok/s -> not measured")
            continue
        change = after["tok_s"] / before["tok_s"] - 1
        lines.append(
            f"{name}: {before['tok_s']:.1f} -> {after['tok_s']:.1f} tok/s ({100 * change:+.1f} %; "
            f"{_noise(before['seconds'], after['seconds'], abs(change))})"
        )
    return "\n".join(lines)


def _noise(before: list[float], after: list[float], change: float) -> str:
    """How far the repeats of each record lie apart, beside a change of the median."""
    if min(len(before), len(after)) < 2:
        return "one repeat has no spread, so noise cannot be told from a change: use --repeats 5"
    spread = max((max(seconds) - min(seconds)) / median(seconds) for seconds in (before, after))
    return f"repeats spread by {100 * spread:.0f} %{', so this may be noise' if change < spread else ''}"
