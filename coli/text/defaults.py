"""What a checkpoint's small JSON files say about an answer: the ids that end it and the sampling it was made for.

Reads ``generation_config.json``, ``config.json`` and ``tokenizer_config.json`` of a container folder, each of which may
be absent.  Stop ids are the union of the three files: uploads are known in which no single one names all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from coli.config import read_json_object, shown
from coli.errors import ModelError

SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def read_json_if_present(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``, ``{}`` where there is no such file; ModelError naming a damaged one."""
    return read_json_object(path) if path.exists() else {}


def stop_ids(folder: Path, token_id: Callable[[str], int | None] | None = None) -> frozenset[int]:
    """The ids that end an answer, from every file that names one.

    token_id : the tokenizer's look-up, for the ``eos_token`` that tokenizer_config.json gives as text.
    Raises ModelError naming the file and field when an id is not one.
    """
    found: set[int] = set()
    generation = folder / "generation_config.json"
    found.update(_ids(read_json_if_present(generation).get("eos_token_id"), generation))
    path = folder / "config.json"
    config = read_json_if_present(path)
    text_config = config.get("text_config")
    for level in (config, text_config if isinstance(text_config, dict) else {}):
        found.update(_ids(level.get("eos_token_id"), path))
    if token_id is not None:
        eos = read_json_if_present(folder / "tokenizer_config.json").get("eos_token")
        eos = eos.get("content") if isinstance(eos, dict) else eos  # older files hold the whole token object
        if isinstance(eos, str) and (eos_id := token_id(eos)) is not None:
            found.add(eos_id)
    return frozenset(found)


def _ids(value: Any, path: Path) -> Iterator[int]:
    for item in value if isinstance(value, list) else [] if value is None else [value]:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise ModelError(f"{path}: eos_token_id holds {shown(item)}; a token id or a list of them was expected")
        yield item


def sampling_defaults(folder: Path) -> dict[str, float | int]:
    """The sampling parameters that generation_config.json gives; ``do_sample: false`` is temperature 0."""
    path = folder / "generation_config.json"
    config = read_json_if_present(path)
    found: dict[str, float | int] = {}
    for key in SAMPLING_KEYS:
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelError(f"{path}: {key} is {shown(value)}; a number was expected")
        found[key] = value
    if config.get("do_sample") is False:
        found["temperature"] = 0.0
    return found
