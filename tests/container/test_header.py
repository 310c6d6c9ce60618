"""coli/container/header.py: what a safetensors header claims is checked against the file; no input crashes it."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from coli.container.header import make_header, parse_header, read_header
from coli.errors import ModelError

CASES = Path(__file__).parent.parent / "data" / "cases" / "safetensors"


def entry(dtype: str = "F32", shape: tuple[int, ...] = (2,), begin: int = 0, end: int = 8) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def parse(fields: object, data_bytes: int):
    raw = json.dumps(fields).encode()
    return parse_header(raw, 8 + len(raw) + data_bytes, "x.safetensors")


def test_file_shorter_than_its_header_says_names_both_sizes():
    """C15: refused before any tensor is read, with the bytes expected and found."""
    with pytest.raises(
        ModelError, match=r"short_data.safetensors: is cut off: its header says 299 bytes, the file has"
    ):
        read_header(CASES / "short_data.safetensors")


def test_header_that_is_right_gives_offsets_in_the_file():
    """Offsets count from the start of the file, whatever the order of the names."""
    raw = json.dumps({"b": entry(begin=8, end=16), "a": entry(), "__metadata__": {"format": "pt"}}).encode()
    header = parse_header(raw, 8 + len(raw) + 16, "x")
    assert {n: (t.offset - header.data_offset, t.n_bytes) for n, t in header.tensors.items()} == {
        "a": (0, 8),
        "b": (8, 8),
    }


@pytest.mark.parametrize(
    ("fields", "data_bytes", "expected"),
    [
        ({"a": entry(), "b": entry(begin=4, end=12)}, 12, "tensor b overlaps a"),
        ({"a": entry(), "b": entry(begin=12, end=20)}, 20, "tensor b leaves a gap after a"),
        ({"a": entry(begin=8, end=16)}, 16, "tensor a leaves a gap after the header"),
        ({"a": entry()}, 9, "has bytes that no tensor owns"),
        ({"a": entry(end=4)}, 4, "needs 8 bytes, its data_offsets span 4"),
        ({"a": entry(dtype="Q9")}, 8, "dtype 'Q9' is not one of safetensors'"),
        ({"a": entry(shape=(-2,))}, 8, r"shape \[-2\] is not a list of sizes"),
        ({"a": entry(begin=-8, end=0)}, 8, "is not a pair of byte numbers"),
        ({"a": 3}, 8, "its entry is a JSON int"),
        ([], 0, "its header is a JSON list"),
    ],
)
def test_header_that_is_wrong_names_the_tensor(fields, data_bytes, expected):
    """Overlaps, gaps, short and overlong data, types and shapes: one line each."""
    with pytest.raises(ModelError, match=expected):
        parse(fields, data_bytes)


def test_name_that_stands_twice_is_refused():
    """JSON would keep the last one and never say so."""
    raw = b'{"a":' + json.dumps(entry()).encode() + b',"a":' + json.dumps(entry()).encode() + b"}"
    with pytest.raises(ModelError, match="'a' stands twice"):
        parse_header(raw, 8 + len(raw) + 8, "x")


@pytest.mark.parametrize("data", [b"", b"\0" * 7, struct.pack("<Q", 100), struct.pack("<Q", 2**63) + b"{}" * 9])
def test_file_without_a_whole_header_is_refused(tmp_path, data):
    """Empty, shorter than its length, a length beyond the file: no allocation, one line."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=f"{path}: not a whole safetensors file: it has {len(data)} bytes"):
        read_header(path)


def test_header_made_here_is_read_by_the_safetensors_package(tmp_path):
    """Our files are safetensors files, with the data section where it was asked for."""
    tensors = [("u", "U8", (512,)), ("f", "F32", (3, 5)), ("h", "BF16", (7,))]
    head = make_header(tensors, 4096)
    path = tmp_path / "x.safetensors"
    path.write_bytes(head + bytes(512) + np.arange(15, dtype=np.float32).tobytes() + bytes(14))
    assert len(head) % 4096 == 0
    with safe_open(path, "np") as opened:
        assert set(opened.keys()) == {"u", "f", "h"}
        assert np.array_equal(opened.get_tensor("f"), np.arange(15, dtype=np.float32).reshape(3, 5))
    assert {n: t.shape for n, t in read_header(path).tensors.items()} == {n: s for n, _, s in tensors}


field = (
    st.none() | st.booleans() | st.integers(-2, 2**64) | st.text(max_size=4) | st.lists(st.integers(-2, 99), max_size=3)
)
tensor = st.fixed_dictionaries(
    {"dtype": st.sampled_from(["F32", "BF16", "U8", "F4", "X"]), "shape": field, "data_offsets": field}
)


@settings(max_examples=300)
@given(st.dictionaries(st.text(max_size=3), tensor | field, max_size=3), st.integers(0, 64))
def test_any_header_is_read_or_refused(fields, data_bytes):
    """Whatever the JSON says, the outcome is a header or one ModelError."""
    try:
        header = parse(fields, data_bytes)
    except ModelError as error:
        assert "\n" not in str(error)
    else:
        assert sum(t.n_bytes for t in header.tensors.values()) == data_bytes


@settings(max_examples=300)
@given(st.data())
def test_damaged_file_is_refused_or_also_accepted_by_the_safetensors_package(tmp_path_factory, data):
    """A few bytes changed anywhere in a good file: never a crash, and never laxer than the package itself."""
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    good = make_header([("a", "F32", (4,)), ("b", "BF16", (2, 3))], 8) + bytes(28)
    damaged = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged[: data.draw(st.integers(0, len(good)))] if data.draw(st.booleans()) else damaged)
    try:
        read_header(path)
    except ModelError:
        return
    try:
        with safe_open(path, "np"):
            pass
    except SafetensorError as error:
        pytest.fail(f"we accept what the package refuses: {error}")
