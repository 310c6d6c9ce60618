"""The readers of files that come from elsewhere, each as a function of bytes, with good files to start from.

``test_readers.py`` feeds them a few hundred damaged files, ``fuzz.py`` as many as one likes.  The rule for each of them
is `outcome`: success, or one ColiError whose message is one line of printable characters.
"""

from __future__ import annotations

import dataclasses
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import checkpoints
import numpy as np
from conftest import DATA, FIXTURES
from convert import gguf_writer

from coli.config import ModelConfig, read_json_object
from coli.container.header import make_header, read_header
from coli.container.manifest import parse_manifest, read_manifest
from coli.container.reader import Container
from coli.container.schema import file_name
from coli.convert.checkpoint import INDEX_NAME, Checkpoint
from coli.convert.convert import convert
from coli.convert.gguf import GgufCheckpoint
from coli.convert.gguf_file import read_gguf
from coli.convert.plan import plan_sources
from coli.errors import ColiError
from coli.text.defaults import sampling_defaults, stop_ids
from coli.text.template import template_sources
from coli.text.tokenizer import Tokenizer
from coli.tier.heatfile import HeatShape, format_heat, parse_heat

NAMES = ("header", "index", "config", "tokenizer", "heat", "container", "gguf")
LONGEST_MESSAGE = 600  # a line that a person reads, whatever the file held


class Reader(NamedTuple):
    """read : takes the bytes of a file; returns, or raises a ColiError.   seeds : files that it accepts."""

    read: Callable[[bytes], None]
    seeds: tuple[bytes, ...]


def outcome(reader: Reader, data: bytes) -> str | None:
    """The message of the refusal, None where the file was taken.  Anything else that is raised is a fault."""
    try:
        reader.read(data)
    except ColiError as error:
        message = str(error)
        assert message.isprintable(), f"not one line of printable characters: {message!r}"
        assert 0 < len(message) <= LONGEST_MESSAGE, f"a message of {len(message)} characters: {message[:200]!r}"
        return message
    return None


def make(name: str, scratch: Path) -> Reader:
    """The reader of one of NAMES.  scratch : an empty folder for the files that it reads."""
    makers = (_header, _index, _config, _tokenizer, _heat, _container, _gguf)
    return dict(zip(NAMES, makers, strict=True))[name](scratch)


def _header(scratch: Path) -> Reader:
    path = scratch / "model.safetensors"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        header = read_header(path)
        places = sorted((t.offset, t.n_bytes) for t in header.tensors.values())
        assert header.file_bytes == len(data) == header.data_offset + sum(n_bytes for _, n_bytes in places)
        assert all(header.data_offset <= offset <= len(data) - n_bytes for offset, n_bytes in places)

    tensors = [("a", "U8", (512,)), ("b.weight", "F32", (3, 5)), ("c", "BF16", (7,)), ("d", "F8_E4M3", (2, 2, 2))]
    few = make_header(tensors[:1], 8) + bytes(512)
    raw = b'{"__metadata__":{"format":"pt"},"s":{"dtype":"I64","shape":[],"data_offsets":[0,8]}}'
    return Reader(read, (make_header(tensors, 8) + bytes(594), few, struct.pack("<Q", len(raw)) + raw + bytes(8)))


def _index(scratch: Path) -> Reader:
    """The list of shards, beside good shards."""
    folder = checkpoints.write(scratch / "hf", "fp8_block")
    path = folder / INDEX_NAME
    seed = path.read_bytes()

    def read(data: bytes) -> None:
        path.write_bytes(data)
        with Checkpoint(folder) as checkpoint:
            plan_sources(checkpoint)

    return Reader(read, (seed,))


def _config(scratch: Path) -> Reader:
    """One object stands in all three files: their keys are apart, or mean the same."""
    (scratch / "generation_config.json").symlink_to("config.json")
    (scratch / "tokenizer_config.json").symlink_to("config.json")

    def read(data: bytes) -> None:
        (scratch / "config.json").write_bytes(data)
        config = ModelConfig.from_folder(scratch)
        assert config.rotary_dim % 2 == 0 and config.conv_channels > 0 and len(config.full_layers) >= 0
        assert all(0 <= i < config.vocab_size for i in config.eos_token_ids)
        stop_ids(scratch, {"<|im_end|>": 258}.get)
        sampling_defaults(scratch)
        template_sources(scratch)

    others = {"eos_token": {"content": "<|im_end|>"}, "chat_template": [{"name": "default", "template": "{{ x }}"}]}
    others |= {"temperature": 0.7, "top_k": 20, "do_sample": True, "eos_token_id": [258, 256]}
    old = checkpoints.text_config() | {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "rope_scaling": None}
    del old["rope_parameters"]
    return Reader(read, tuple(json.dumps(c | others).encode() for c in (checkpoints.nested_config(), old)))


def _tokenizer(scratch: Path) -> Reader:
    def read(data: bytes) -> None:
        (scratch / "tokenizer.json").write_bytes(data)
        tokenizer = Tokenizer.open(scratch)
        ids = tokenizer.encode("a<|im_end|>\u00e9 <think>12")
        assert not set(ids) & set(tokenizer.added.values())
        tokenizer.decode([*ids, 5, tokenizer.size, 1 << 33], skip_special=True)
        tokenizer.encode("x<|im_end|>", special=True)

    bpe = json.loads((FIXTURES / "tokenizer" / "tokenizer.json").read_text())
    bpe["model"]["merges"] = merges = bpe["model"]["merges"][:6]
    kept = {"".join(merge if isinstance(merge, list) else merge.split(" ")) for merge in merges}
    bpe["model"]["vocab"] = {t: i for t, i in bpe["model"]["vocab"].items() if len(t) == 1 or t in kept}
    tiny = (DATA / "cases" / "tiny_nested" / "tokenizer.json").read_bytes()
    return Reader(read, (tiny, json.dumps(bpe, ensure_ascii=False).encode()))


def _heat(scratch: Path) -> Reader:
    shape = HeatShape(layers=3, experts=4, top_k=2, model="m")

    def read(data: bytes) -> None:
        counts = parse_heat(data, shape, "heat.json")
        assert counts.shape == (3, 4) and np.isfinite(counts).all() and (counts >= 0).all()
        assert np.abs(parse_heat(format_heat(counts, shape), shape, "again") - counts).max() <= 0.001

    counts = np.arange(12.0).reshape(3, 4) * 1.25
    bare = {"layers": 3, "experts": 4, "top_k": 2, "counts": counts.astype(int).tolist()}
    return Reader(read, (format_heat(counts, shape), json.dumps(bare).encode()))


def _container(scratch: Path) -> Reader:
    """A manifest beside good files; or, where the bytes are no JSON object, a file of weights under a good manifest."""
    folder, weights = scratch / "container", file_name(1)
    convert(checkpoints.write(scratch / "hf"), folder)
    manifest_bytes, weight_bytes = ((folder / name).read_bytes() for name in ("coli.json", weights))
    good = read_manifest(folder)

    def read(data: bytes) -> None:
        is_manifest = data.lstrip()[:1] == b"{"
        (folder / "coli.json").write_bytes(data if is_manifest else manifest_bytes)
        if not is_manifest:
            (folder / weights).write_bytes(data)
        if is_manifest:
            manifest = parse_manifest(read_json_object(folder / "coli.json"), "coli.json")
        else:
            files = good.files | {weights: good.files[weights] | {"bytes": len(data)}}
            manifest = dataclasses.replace(good, files=files)
        try:
            with Container.open_as(folder, manifest) as container:
                assert sum(container.bytes_by_component().values()) > 0 < container.embed.rows
        finally:
            if not is_manifest:
                (folder / weights).write_bytes(weight_bytes)

    return Reader(read, (manifest_bytes, weight_bytes))


def _gguf(scratch: Path) -> Reader:
    """The header of a GGUF file, before its good weights."""
    path = gguf_writer.write(FIXTURES / "tiny-textonly", scratch / "m.gguf", "Q4_0", template="{{ messages }}")
    whole, start = path.read_bytes(), min(entry.offset for entry in read_gguf(path).tensors.values())

    def read(data: bytes) -> None:
        path.write_bytes(data + whole[start:])
        with GgufCheckpoint(path) as checkpoint:
            plan_sources(checkpoint)
            checkpoint.extra_files()

    return Reader(read, (whole[:start],))


# ---------------------------------------------------------------- damage

_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 1 << 31, 1 << 40, 1 << 53, 1 << 63, 10**25, 0.5, -0.0, 1e308, float("nan"),
    float("inf"), "", "x", "\0", "a\nb", "\x1b[2J", "\ud800", "é" * 700, "ByteLevel", "(((", "F32", "BF16", "i4_row",
    [], {}, [[]], [0, 8], [1, 2, 3], {"a": 1}, [["a"]], [None] * 40,
)  # fmt: skip


def damage(data: bytes, rng: random.Random) -> bytes:
    """A file with a few things wrong: parts of its JSON replaced, moved or removed, bytes changed, its end cut off."""
    length = struct.unpack("<Q", data[:8])[0] if len(data) > 8 and data[:1] != b"{" else 0
    start = 8 if 0 < length <= len(data) - 8 else 0
    raw, rest = data[start : start + (length if start else len(data))], data[start + length :] if start else b""
    if rng.random() < 0.8:
        try:
            value = {"root": json.loads(raw)}
            for _ in range(rng.choice((1, 1, 1, 2, 3))):
                _damage_json(value, rng)
            raw = json.dumps(value["root"], ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
        except (ValueError, RecursionError, OverflowError):
            raw = _damage_bytes(raw, rng)
    else:
        raw = _damage_bytes(raw, rng)
    if start:
        raw += b" " * (-(8 + len(raw)) % (4096 if rng.random() < 0.8 else 1))  # keeps the tensors aligned, mostly
        said = len(raw) if rng.random() < 0.9 else rng.choice((0, 1, len(raw) + 1, len(raw) + len(rest), 1 << 62))
        if rng.random() < 0.2:
            rest = rest + bytes(rng.randrange(9)) if rng.random() < 0.5 else rest[: rng.randrange(len(rest) + 1)]
        return struct.pack("<Q", said) + raw + rest
    return raw


def _damage_json(value: dict[str, Any], rng: random.Random) -> None:
    nodes: list[tuple[Any, Any]] = []
    parent, key = value, "root"
    while True:  # a random path from the root, which visits deep parts as often as broad ones
        nodes.append((parent, key))
        child = parent[key]
        if not isinstance(child, (dict, list)) or not child or (len(nodes) > 1 and rng.random() < 0.25):
            break
        parent, key = child, rng.choice(list(child)) if isinstance(child, dict) else rng.randrange(len(child))
    action, found = rng.randrange(7), parent[key]
    if action == 0 and parent is not value:
        del parent[key]
    elif action == 1 and isinstance(parent, dict) and parent is not value:
        parent[rng.choice(("x", "", f"{key} ", str(key).upper(), "\n", "__metadata__"))] = parent.pop(key)
    elif action == 2 and isinstance(found, (int, float)):
        parent[key] = found + rng.choice((-1, 1, 0.5, 1 << 32))
    elif action == 3 and len(nodes) > 2:
        other, at = rng.choice(nodes[:-1])
        parent[key] = json.loads(json.dumps(other[at]))  # a copy: a cycle is no JSON
    elif action == 4:
        parent[key] = [found] * rng.randrange(4)
    else:
        parent[key] = rng.choice(_VALUES)


def _damage_bytes(raw: bytes, rng: random.Random) -> bytes:
    changed = bytearray(raw)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(changed) + 1)
        action = rng.randrange(4)
        if action == 0:
            piece = rng.choice((b"", b"[" * 2000, b'"', b"\\u", b"\xff", b"{}", b"9" * 5000))
            changed[at : at + rng.randrange(9)] = piece
        elif action == 1 and at < len(changed):
            changed[at] = rng.randrange(256)
        elif action == 2:
            del changed[at:]
        else:
            changed[at:at] = changed[at : at + rng.randrange(60)]
    return bytes(changed)
