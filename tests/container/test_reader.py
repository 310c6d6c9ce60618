"""coli/container/reader.py: views that are the file's bytes, byte tables that add up, and everything odd refused."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coli.config import ModelConfig
from coli.container.header import make_header, read_header
from coli.container.layout import matrix_layout, slab_layout
from coli.container.manifest import parse_manifest
from coli.container.reader import Container
from coli.container.schema import COMPONENTS, entries
from coli.errors import ModelError

FORMATS = [(8, 4, "group"), (8, 4, "row"), (8, 8, "group"), (4, 4, "group"), (16, 16, "group")]


@pytest.fixture
def copy(make_container, tmp_path):
    """A container of its own for a test that spoils it."""

    def make(name: str = "tiny-random", **formats) -> Path:
        return Path(shutil.copytree(make_container(name, **formats), tmp_path / "container"))

    return make


def edit_manifest(folder: Path, edit) -> None:
    values = json.loads((folder / "coli.json").read_text())
    edit(values)
    (folder / "coli.json").write_text(json.dumps(values))


def rewrite(folder: Path, file: str, edit) -> None:
    """Change the tensors (name: (dtype, shape, data)) of a file and the manifest's size of it."""
    header, data = read_header(folder / file), (folder / file).read_bytes()
    tensors = {t.name: (t.dtype, t.shape, data[t.offset : t.offset + t.n_bytes]) for t in header.tensors.values()}
    tensors = edit(tensors) or tensors
    head = make_header([(name, dtype, shape) for name, (dtype, shape, _) in tensors.items()], 4096)
    (folder / file).write_bytes(head + b"".join(d for _, _, d in tensors.values()))
    edit_manifest(folder, lambda m: m["files"][file].update(bytes=(folder / file).stat().st_size))


@pytest.mark.parametrize(("trunk_bits", "expert_bits", "scales"), FORMATS)
@pytest.mark.parametrize("name", ["tiny-random", "tiny-textonly"])
def test_container_opens_and_its_bytes_add_up(make_container, name, trunk_bits, expert_bits, scales):
    """Components and headers are the files' bytes; a token reads one embedding row and top-k experts of them."""
    folder = make_container(name, trunk_bits=trunk_bits, expert_bits=expert_bits, expert_scales=scales)
    with Container.open(folder) as container:
        sums, read, config = container.bytes_by_component(), container.bytes_read_per_token(), container.config
        headers = sum(header.data_offset for header in container.headers.values())
        assert tuple(sums) == tuple(read) == COMPONENTS
        assert sum(sums.values()) + headers == sum(p.stat().st_size for p in folder.glob("*.safetensors"))
        stride = container.manifest.experts["stride_bytes"]
        assert sums["experts"] == config.num_hidden_layers * config.num_experts * stride
        assert read["experts"] == config.num_hidden_layers * config.num_experts_per_tok * stride
        assert read["embed"] == config.hidden_size * 2
        for component in ("dnproj", "dnout", "attnproj", "shexp", "router", "small"):
            assert read[component] == sums[component] > 0
        tied_head = name == "tiny-textonly" and trunk_bits == 16
        assert (sums["lmhead"], read["lmhead"]) == ((0, sums["embed"]) if tied_head else (sums["lmhead"],) * 2)


def test_views_are_the_mapped_bytes(make_container):
    """matrix, slabs and float32 give what a plain reading of the file gives, copying nothing where they need not."""
    folder = make_container("tiny-random")
    with Container.open(folder) as container:
        data = (folder / "model-00001.safetensors").read_bytes()
        places = read_header(folder / "model-00001.safetensors").tensors
        matrix = container.matrix("layers.0.linear_attn.in_proj_qkvz")
        place = places[matrix.name]
        assert matrix.data.tobytes() == data[place.offset : place.offset + place.n_bytes]
        layout = matrix_layout("i8_row", matrix.rows, matrix.cols)
        assert (matrix.block_bytes, matrix.n_blocks) == (layout.block_bytes, layout.n_blocks)
        assert matrix.data.base is not None and not matrix.data.flags.writeable and matrix.data.ctypes.data % 256 == 0
        slabs = container.slabs("layers.0.mlp.experts")
        expected = slab_layout("i4_group", 64, 32)
        assert (slabs.count, slabs.stride_bytes, slabs.data.size) == (8, expected.total_bytes, 8 * expected.total_bytes)
        assert (slabs.up_offset, slabs.down_offset) == (expected.up_offset, expected.down_offset)
        a_log = places["layers.0.linear_attn.A_log"]
        stored = np.frombuffer(data[a_log.offset : a_log.offset + a_log.n_bytes], np.float32)
        assert np.array_equal(container.float32("layers.0.linear_attn.A_log"), stored)
        assert container.embed.block_bytes == 128 and container.embed.data.size == 256 * 128
        before = container.slabs("layers.0.mlp.experts").data.tobytes()
        for name in ("layers.0.mlp.experts", "none of this model's"):
            container.will_not_need(name)
        assert before == container.slabs("layers.0.mlp.experts").data.tobytes()


def test_tied_head_of_a_16_bit_container_is_its_embedding(make_container):
    """No second copy on disk; the name lm_head still answers."""
    with Container.open(make_container("tiny-textonly", trunk_bits=16, expert_bits=16)) as container:
        head = container.matrix("lm_head")
        assert (head.name, head.format, head.rows, head.cols) == ("lm_head", "bf16", 512, 48)
        assert head.data.ctypes.data == container.embed.data.ctypes.data
    with Container.open(make_container("tiny-textonly")) as container:
        assert container.matrix("lm_head").format == "i8_row"


def test_wrong_kind_of_tensor_is_refused_by_name(make_container):
    """A vector is no matrix, slabs are no vector, an unknown name is said to be one; a closed container says so."""
    with Container.open(make_container("tiny-random")) as container:
        for call, name, expected in (
            (container.matrix, "layers.0.mlp.experts", "not a matrix"),
            (container.matrix, "norm", "not a matrix"),
            (container.slabs, "lm_head", "not expert slabs"),
            (container.float32, "lm_head", "no float32 form"),
            (container.float32, "layers.9.norm", "there is no tensor"),
        ):
            with pytest.raises(ModelError, match=expected):
                call(name)
    with pytest.raises(ModelError, match="the container is closed"):
        container.matrix("lm_head")


def test_views_outlive_the_container(make_container):
    """close() frees no memory under a view that is still in use."""
    with Container.open(make_container("tiny-random")) as container:
        data = container.matrix("lm_head").data
        before = data.copy()
    assert np.array_equal(data, before)


def damage(folder: Path, what: str) -> None:
    file = folder / "model-00001.safetensors"
    if what == "no manifest":
        (folder / "coli.json").unlink()
    elif what == "unfinished":
        (folder / "coli.json").unlink()
        (folder / "journal.jsonl").write_text("{}\n")
    elif what == "version":
        edit_manifest(folder, lambda m: m.update(version=2))
    elif what == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    elif what == "missing file":
        file.unlink()
    elif what == "unlisted file":
        edit_manifest(folder, lambda m: m["files"].pop("model-00001.safetensors"))
    elif what == "missing tensor":
        rewrite(folder, file.name, lambda t: {n: v for n, v in t.items() if not n.endswith("dt_bias")})
    elif what == "unknown tensor":
        rewrite(folder, file.name, lambda t: t | {"layers.0.mystery": ("F32", (1,), b"\0\0\0\0")})
    elif what == "wrong shape":
        rewrite(folder, file.name, lambda t: {n: (d, s[::-1], b) for n, (d, s, b) in t.items()})
    elif what == "wrong type":
        rewrite(folder, file.name, lambda t: {n: ("I16" if d == "BF16" else d, s, b) for n, (d, s, b) in t.items()})
    elif what == "misplaced":
        rewrite(folder, file.name, lambda t: {n: t[n] for n in sorted(t, key=lambda n: t[n][0] == "U8")})
    elif what == "matrix format":
        edit_manifest(folder, lambda m: m["matrices"]["lm_head"].update(format="bf16"))
    elif what == "matrix rows":
        edit_manifest(folder, lambda m: m["matrices"]["lm_head"].update(rows=255))
    elif what == "stride":
        edit_manifest(folder, lambda m: m["experts"].update(stride_bytes=1))
    elif what == "kv":
        edit_manifest(folder, lambda m: m.update(kv_dtype="float32"))
    elif what == "tied":
        edit_manifest(folder, lambda m: m.update(tied=True))
    elif what == "trunk format":
        edit_manifest(folder, lambda m: m.update(trunk_format="i3_row"))
    elif what == "path":
        edit_manifest(folder, lambda m: m["files"].update({"../x": {"bytes": 1, "sha256": "0" * 64}}))
    elif what in ("null byte", "long name"):
        name = {"null byte": "a\0b", "long name": "x" * 300}[what]
        edit_manifest(folder, lambda m: m["files"].update({name: {"bytes": 1, "sha256": "0" * 64}}))
    elif what == "format of another kind":
        edit_manifest(folder, lambda m: m["matrices"]["lm_head"].update(format={"a": 1}))
    elif what == "config":
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["num_experts"] = 9
        text = json.dumps(config)
        (folder / "config.json").write_text(text)
        digest = hashlib.sha256(text.encode()).hexdigest()
        edit_manifest(folder, lambda m: m["files"]["config.json"].update(bytes=len(text), sha256=digest))


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("no manifest", "container: not a container: there is no coli.json in it"),
        ("unfinished", "an unfinished conversion; run the same coli convert again"),
        ("version", "container version 2; this coli reads version 1"),
        ("truncated", r"model-00001.safetensors: \d+ bytes; coli.json says \d+"),
        ("missing file", "model-00001.safetensors: missing; coli.json lists it"),
        ("unlisted file", "files does not list model-00001.safetensors"),
        ("missing tensor", "tensor layers.0.linear_attn.dt_bias is missing"),
        ("unknown tensor", "tensor layers.0.mystery is none of this model's"),
        ("wrong shape", r"tensor layers.0.linear_attn.in_proj_ba is BF16 \[64, 8\]; expected BF16 \[8, 64\]"),
        ("wrong type", "is I16; expected F32, BF16, F16"),
        ("misplaced", "expected a multiple of 256"),
        ("matrix format", "matrices.lm_head has format bf16, which does not go with trunk_format i8_row"),
        ("matrix rows", "matrices.lm_head is .*'rows': 255.*; config.json makes it 256 rows and 64 cols"),
        ("stride", "experts.stride_bytes is 1; config.json makes it"),
        ("kv", "kv_dtype is 'float32'"),
        ("tied", "tied is True, but config.json says False"),
        ("trunk format", "trunk_format is 'i3_row'; expected one of i8_row"),
        ("path", r"files is '../x'; expected names of files in the folder"),
        ("null byte", r"files is 'a\\x00b'; expected names of files in the folder"),
        ("long name", r"files is 'x{70,80}\.\.\.; expected names of files in the folder"),
        ("format of another kind", r"matrices\['lm_head'\] is .*; expected an object whose format is one of i8_row"),
        ("config", r"mlp.gate is BF16 \[8, 64\]; expected BF16 \[9, 64\]|experts.count is 8; config.json makes it 9"),
    ],
)
def test_damaged_container_is_refused_in_one_line(copy, what, expected):
    """Whatever is wrong with a folder is said with the file and the tensor or field, before any weight is used."""
    folder = copy()
    damage(folder, what)
    with pytest.raises(ModelError, match=expected) as caught:
        Container.open(folder)
    assert "\n" not in str(caught.value)


def flip(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert data.count(old) >= 1
    path.write_bytes(data.replace(old, new, 1))


@pytest.mark.parametrize(
    ("file", "old", "new"), [("config.json", b"1e-06", b"1e-05"), ("tokenizer.json", b'"a"', b'"A"')]
)
def test_byte_that_arithmetic_or_ids_hang_on_is_missed_at_load(copy, file, old, new):
    """Another epsilon or another token's text would give other answers, silently: the checksum says so first."""
    folder = copy("tiny-textonly")
    flip(folder / file, old, new)
    with pytest.raises(ModelError, match=f"{file}: damaged or edited: its sha256 is not the one in coli.json"):
        Container.open(folder)


@pytest.mark.parametrize("file", ["generation_config.json", "tokenizer_config.json"])
def test_file_that_people_adjust_is_used_and_said(copy, caplog, monkeypatch, file):
    """Edited in place, longer or of the same length: one warning with the file's name, and the model opens."""
    monkeypatch.setattr(logging.getLogger("coli"), "handlers", [])  # whatever an earlier test set up
    monkeypatch.setattr(logging.getLogger("coli"), "propagate", True)
    folder = copy("tiny-textonly")
    with caplog.at_level("WARNING"), Container.open(folder):
        assert caplog.messages == []
    data = (folder / file).read_bytes()
    for edited in (data + b" ", b" ".join([data[:1], data[2:]])):
        (folder / file).write_bytes(edited)
        caplog.clear()
        with caplog.at_level("WARNING"), Container.open(folder):
            assert caplog.messages == [f"{folder / file}: not the file that was converted; it is used as it is"]
    (folder / file).unlink()
    with pytest.raises(ModelError, match=f"{file}: missing"):
        Container.open(folder)


def test_schema_names_every_component_and_no_name_twice():
    """The one list that converter, reader and byte tables share."""
    config = ModelConfig.from_dict({"model_type": "qwen3_5_moe_text", "rope_theta": 1e7})
    schema = entries(config)
    assert len({e.name for e in schema}) == len(schema) == 3 + 30 * 13 + 10 * 10
    assert {e.component for e in schema} == set(COMPONENTS)
    assert {e.file for e in schema} == {f"model-{i:05d}.safetensors" for i in range(41)}
    assert len(entries(config, has_lm_head=False)) == len(schema) - 1


value = st.none() | st.booleans() | st.integers(-1, 9) | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
nested = st.dictionaries(
    st.text(max_size=3), value | st.dictionaries(st.text(max_size=3), value, max_size=2), max_size=2
)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_manifest_is_read_or_refused(make_container, data):
    """Any value in any field of coli.json, at two depths: a checked manifest or one ModelError."""
    values = json.loads((make_container("tiny-random") / "coli.json").read_text())
    key = data.draw(st.sampled_from(sorted(values)))
    if isinstance(values[key], dict) and values[key] and data.draw(st.booleans()):
        values[key][data.draw(st.sampled_from(sorted(values[key])))] = data.draw(value | nested)
    else:
        values[key] = data.draw(value | nested)
    try:
        parse_manifest(values, "coli.json")
    except ModelError as error:
        assert "\n" not in str(error)
