"""``coli.json``: what a container says of itself, every field checked.  Written last: its presence is the end mark."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from coli.config import read_json_object, shown
from coli.container.layout import FORMATS
from coli.errors import ModelError

MANIFEST_NAME = "coli.json"
VERSION = 1

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Manifest:
    """The fields of ``coli.json``.

    trunk_format, expert_format : names of ``layout.FORMATS``.  In a 16-bit container ``trunk_format`` is the stored
        type that all trunk matrices share, or f32 where they differ; ``matrices`` has each one's own.
    kv_dtype : "float16" or "float32", of keys and values.
    tied : whether the checkpoint's head was its embedding.
    source : what was converted: name, tensors, bytes.
    skipped : {"mtp": {"tensors", "bytes"}, "visual": {...}}, left out by name.
    matrices : {name: {"format", "rows", "cols"}}.
    experts : {"format", "count", "hidden_size", "intermediate_size", "stride_bytes"}.
    files : {name: {"bytes", "sha256"}}, and for a safetensors file "tensors": {name: sha256}.
    report : how far quantisation moved the weights; {} where nothing was quantised.
    """

    coli_version: str
    trunk_format: str
    expert_format: str
    kv_dtype: str
    tied: bool
    source: dict[str, Any]
    skipped: dict[str, dict[str, int]]
    matrices: dict[str, dict[str, Any]]
    experts: dict[str, Any]
    files: dict[str, dict[str, Any]]
    report: dict[str, Any]

    @property
    def is_quantised(self) -> bool:
        """False for a 16-bit container: weights as stored, activations not quantised."""
        return FORMATS[self.trunk_format].is_blocks

    def to_dict(self) -> dict[str, Any]:
        """The JSON object, as written."""
        return {"format": "coli", "version": VERSION} | {f.name: getattr(self, f.name) for f in fields(self)}


def read_manifest(folder: Path) -> Manifest:
    """Read and check ``coli.json`` of a folder.  Raises ModelError naming the file and the field."""
    path = folder / MANIFEST_NAME
    return parse_manifest(read_json_object(path), str(path))


def parse_manifest(values: dict[str, Any], source: str) -> Manifest:
    """Check a parsed ``coli.json``.  source : what errors call the file."""

    def error(field: str, found: Any, expected: str) -> ModelError:
        return ModelError(f"{source}: {field} is {shown(found)}; expected {expected}")

    if values.get("format") != "coli":
        raise error("format", values.get("format"), "'coli'")
    version = values.get("version")
    if version != VERSION or isinstance(version, bool):
        raise ModelError(
            f"{source}: container version {shown(version)}; this coli reads version {VERSION}: "
            "convert the checkpoint again"
        )
    types = {"str": str, "bool": bool}
    for field in fields(Manifest):
        value, kind = values.get(field.name), types.get(str(field.type), dict)
        if not isinstance(value, kind):
            raise error(field.name, value, f"a JSON {'object' if kind is dict else kind.__name__}")
    made = Manifest(**{field.name: values[field.name] for field in fields(Manifest)})

    for field in ("trunk_format", "expert_format"):
        if not _is_format(getattr(made, field)):
            raise error(field, getattr(made, field), f"one of {', '.join(FORMATS)}")
    if FORMATS[made.expert_format].is_blocks != made.is_quantised:
        raise error("expert_format", made.expert_format, f"one that goes with trunk_format {made.trunk_format}")
    if made.kv_dtype != ("float16" if made.is_quantised else "float32"):
        raise error("kv_dtype", made.kv_dtype, f"the one that goes with trunk_format {made.trunk_format}")
    for name, matrix in made.matrices.items():
        if not isinstance(matrix, dict) or not _is_format(matrix.get("format")):
            raise error(f"matrices[{shown(name)}]", matrix, f"an object whose format is one of {', '.join(FORMATS)}")
    for name, file in made.files.items():
        if not is_file_name(name):
            raise error("files", name, "names of files in the folder")
        if not isinstance(file, dict) or type(file.get("bytes")) is not int:
            raise error(f"files.{name}", file, "an object with the file's bytes")
        digests = {"": file.get("sha256")} | _object(file, "tensors")
        if not all(isinstance(d, str) and _SHA256.fullmatch(d) for d in digests.values()):
            raise error(f"files.{name}", "without its checksums", "sha256 of the file and of each tensor")
    return made


def is_file_name(name: object) -> bool:
    """Whether this is the name of a file in a folder, as any system takes it, and no path out of it."""
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name.encode()) <= 255:
        return False
    return not set(name) & set("/\\") and name not in (".", "..")


def _is_format(value: object) -> bool:
    return isinstance(value, str) and value in FORMATS


def _object(values: dict[str, Any], key: str) -> dict[str, Any]:
    value = values.get(key, {})
    return value if isinstance(value, dict) else {"": None}
