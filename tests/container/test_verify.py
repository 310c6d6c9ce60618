"""coli/container/verify.py: one changed byte anywhere is found, and named by file and tensor."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from coli.container.header import read_header
from coli.container.layout import matrix_layout
from coli.container.reader import Container
from coli.container.verify import verify
from coli.errors import ModelError


@pytest.fixture
def folder(make_container, tmp_path) -> Path:
    return Path(shutil.copytree(make_container("tiny-random"), tmp_path / "container"))


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def check(folder: Path) -> int:
    with Container.open(folder) as container:
        return verify(container)


def seal(folder: Path, file: str) -> None:
    """Make the manifest's checksums those of the bytes: what a converter with a fault would have written."""
    values, data = json.loads((folder / "coli.json").read_text()), (folder / file).read_bytes()
    values["files"][file]["sha256"] = hashlib.sha256(data).hexdigest()
    for t in read_header(folder / file).tensors.values():
        values["files"][file]["tensors"][t.name] = hashlib.sha256(data[t.offset : t.offset + t.n_bytes]).hexdigest()
    (folder / "coli.json").write_text(json.dumps(values))


@pytest.mark.parametrize("bits", [(8, 4), (16, 16)])
def test_sound_container_verifies_every_byte(make_container, bits):
    """The bytes counted are those of all files but the manifest."""
    folder = make_container("tiny-random", trunk_bits=bits[0], expert_bits=bits[1])
    assert check(folder) == sum(p.stat().st_size for p in folder.iterdir() if p.name != "coli.json")


@pytest.mark.parametrize("name", ["layers.2.mlp.experts", "layers.2.linear_attn.A_log", "layers.2.mlp.shared_expert"])
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_changed_byte_names_file_and_tensor(folder, name, where):
    """A single bit in a tensor is one line with the tensor's name."""
    path = folder / "model-00003.safetensors"
    place = read_header(path).tensors[name]
    flip(path, place.offset + {"first": 0, "middle": place.n_bytes // 2, "last": place.n_bytes - 1}[where])
    with pytest.raises(ModelError, match=f"model-00003.safetensors: tensor {name} is damaged"):
        check(folder)


def test_changed_byte_outside_the_tensors_names_the_file(folder):
    """The padding of a header and the small files are covered too."""
    path = folder / "model-00002.safetensors"
    spare = read_header(path).data_offset - 1
    with open(path, "r+b") as file:
        file.seek(spare)
        file.write(b"\n")  # still white space, so the header reads as before
    with pytest.raises(ModelError, match="model-00002.safetensors: damaged: its header"):
        check(folder)


def test_changed_config_names_the_file(folder):
    """A file that is copied byte for byte is compared byte for byte."""
    path = folder / "generation_config.json"
    path.write_bytes(path.read_bytes().replace(b" ", b"\t"))
    with pytest.raises(ModelError, match="generation_config.json: damaged"):
        check(folder)


@pytest.mark.parametrize("what", ["-128", "scale", "plain", "padding"])
def test_number_that_must_not_be_there_is_found_under_right_checksums(folder, what):
    """A -128, an infinite scale, a NaN, noise in the padding: found by the scan where no checksum could."""
    path = folder / "model-00001.safetensors"
    places = read_header(path).tensors
    name, offset, value = {
        "-128": ("layers.0.linear_attn.out_proj", 128 + 5, b"\x80"),
        "scale": ("layers.0.linear_attn.out_proj", 4, np.array([np.inf], np.float32).tobytes()),
        "plain": ("layers.0.input_layernorm", 6, b"\xc0\x7f"),
        "padding": ("layers.0.mlp.shared_expert", -1, b"\1"),
    }[what]
    # the shared expert's down part, 64 rows of 48, fills its blocks: the padding is behind the gate part's three blocks
    if what == "padding":
        gate = matrix_layout("i8_row", 48, 64)
        assert gate.total_bytes > gate.used_bytes
        offset = gate.used_bytes
    data = bytearray(path.read_bytes())
    start = places[name].offset + offset
    data[start : start + len(value)] = value
    path.write_bytes(data)
    seal(folder, path.name)
    with pytest.raises(ModelError, match=f"model-00001.safetensors: tensor {name} holds"):
        check(folder)
