"""coli/convert/gguf_file.py: headers of GGUF files, good and damaged."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import gguf
import pytest
from conftest import FIXTURES
from convert import gguf_writer
from hypothesis import given, settings
from hypothesis import strategies as st

from coli.convert.gguf import GgufCheckpoint
from coli.convert.gguf_file import first_part, is_gguf, read_gguf
from coli.convert.plan import plan_sources
from coli.errors import ColiError, ModelError

U8, U32, TEXT, ARRAY, U64 = 0, 4, 8, 9, 10
F32, Q8_0 = 0, 8


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def number(key: str, value: int) -> bytes:
    return text(key) + struct.pack("<II", U32, value)


def tensor(name: str, shape: tuple[int, ...], kind: int = F32, at: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, at)


def header(values: list[bytes] = (), tensors: list[bytes] = (), *, magic: bytes = b"GGUF", version: int = 3) -> bytes:
    """The head of a file up to its data, padded to 32 bytes."""
    raw = magic + struct.pack("<IQQ", version, len(tensors), len(values)) + b"".join([*values, *tensors])
    return raw + bytes(-len(raw) % 32)


def test_header_is_what_the_format_says(tmp_path):
    """Every kind of value, both versions, row-major shapes, and offsets from the start of the file."""
    values = [
        number("a", 7),
        text("b") + struct.pack("<I", TEXT) + text("é"),
        text("c") + struct.pack("<IIQ", ARRAY, TEXT, 2) + text("x") + text(""),
        text("d") + struct.pack("<IIQ3B", ARRAY, U8, 3, 1, 2, 255),
        text("e") + struct.pack("<Id", 12, 0.5),
        text("f") + struct.pack("<I?", 7, True),
    ]
    tensors = [tensor("t", (2, 64), Q8_0, 32), tensor("v", (3,))]
    for version in (2, 3):
        raw = header(values, tensors, version=version)
        (tmp_path / "x.gguf").write_bytes(raw + bytes(32 + 4 * 34))
        found = read_gguf(tmp_path / "x.gguf")
        assert {k: v for k, v in found.metadata.items() if k != "d"} == {
            "a": 7,
            "b": "é",
            "c": ["x", ""],
            "e": 0.5,
            "f": True,
        }
        assert found.metadata["d"].tolist() == [1, 2, 255]
        t, v = found.tensors["t"], found.tensors["v"]
        assert (v.shape, v.offset, v.n_bytes) == ((3,), len(raw), 12)
        assert (t.shape, t.offset, t.n_bytes, t.block, t.block_bytes) == ((2, 64), len(raw) + 32, 4 * 34, 32, 34)


def test_alignment_is_the_file_s_own(tmp_path):
    """``general.alignment`` moves the start of the data."""
    raw = header([number("general.alignment", 256)], [tensor("v", (3,))])
    (tmp_path / "x.gguf").write_bytes(raw.ljust(256, b"\0") + bytes(12))
    assert read_gguf(tmp_path / "x.gguf").tensors["v"].offset == 256


GOOD = header([], [tensor("v", (8,)), tensor("w", (8,), at=32)])


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"", "not a GGUF file: it begins with b''"),
        (b"PK\3\4" + bytes(100), r"begins with b'PK\\x03\\x04', expected b'GGUF'"),
        (header(version=1), "GGUF version 1; coli reads 2 and 3"),
        (b"GGUF\0\0\0\3" + bytes(16), "a big-endian GGUF file"),
        (GOOD[:30], "is cut off: .* the file has 30"),
        (GOOD + bytes(63), f"is cut off: tensor w ends at byte {len(GOOD) + 64}, the file has {len(GOOD) + 63}"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 0), "the number of tensors is 1099511627776; expected at most"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 63), "the number of metadata values is"),
        (header([text("a") + struct.pack("<IIQ", ARRAY, U64, 1 << 23)]), "is cut off: a needs 67108864 bytes"),
        (header([text("a") + struct.pack("<IIQ", ARRAY, ARRAY, 1)]), "a is an array of value type 9"),
        (header([text("a") + struct.pack("<I", 13)]), "a has value type 13"),
        (header([text("a") + struct.pack("<I", TEXT) + text(b"\xff")]), r"a is not UTF-8: b'\\xff'"),
        (header([number("a\n", 1)]), r"a metadata key is 'a\\n'"),
        (header([number("a", 1), number("a", 2)]), "a stands twice in its metadata"),
        (header([number("general.alignment", 24)]), "general.alignment is 24; expected a power of two"),
        (
            header([], [tensor("v", (8,), 99)]),
            "tensor v has quantisation type 99, which the gguf package does not know",
        ),
        (header([], [tensor("v", (48,), Q8_0)]), "tensor v has rows of 48, no multiple of its type's 32"),
        (header([], [tensor("v", (1,) * 5)]), "tensor v has 5 dimensions"),
        (header([], [tensor("v", (0, 8))]), r"tensor v has shape \[0, 8\]"),
        (header([], [tensor("v", (1 << 41,))]), "tensor v has shape"),
        (header([], [tensor("v", (8,), at=8)]) + bytes(64), "tensor v starts at byte 8 of the data, no multiple of 32"),
        (header([], [tensor("v", (16,)), tensor("w", (8,), at=32)]) + bytes(64), "tensor w overlaps v"),
        (header([], [tensor("v", (8,)), tensor("v", (8,), at=32)]) + bytes(64), "tensor v is also in"),
        (header([number("split.count", 3)]), r"makes it part 0 \(from 0\) of 3, its name part 0 of 1"),
        (header([number("split.tensors.count", 3)]), "split.tensors.count is 3; its parts hold 0 tensors"),
    ],
)
def test_header_that_is_wrong_is_refused_in_one_line(tmp_path, raw, expected):
    """The file, what was found, what was expected; before anything is allocated for it."""
    path = tmp_path / "x.gguf"
    path.write_bytes(raw)
    with pytest.raises(ModelError, match=expected) as caught:
        read_gguf(path)
    assert str(caught.value).startswith(f"{path}: ") and str(caught.value).isprintable()


def test_parts_in_the_wrong_order_are_refused(tmp_path):
    """A part that was given another's name is not taken for it."""
    for i, number_of in ((1, 1), (2, 0)):
        values = [number("split.no", number_of), number("split.count", 2)]
        (tmp_path / f"m-0000{i}-of-00002.gguf").write_bytes(header(values))
    with pytest.raises(ModelError, match=r"m-00001-of-00002.gguf: its metadata makes it part 1 \(from 0\) of 2"):
        read_gguf(tmp_path / "m-00002-of-00002.gguf")
    with pytest.raises(ModelError, match="there is no part 3 of 2"):
        read_gguf(tmp_path / "m-00003-of-00002.gguf")
    with pytest.raises(ModelError, match="missing; it is part 1 of the 4"):
        read_gguf(tmp_path / "m-00002-of-00004.gguf")
    assert first_part(Path("a/m-00002-of-00004.gguf")) == Path("a/m-00001-of-00004.gguf")
    assert first_part(Path("a/m.gguf")) == Path("a/m.gguf") and is_gguf(Path("M.GGUF")) and not is_gguf(Path("m.bin"))


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> tuple[Path, bytes, int]:
    """Where damaged files go, a good file, and where its data begins."""
    path = tmp_path_factory.mktemp("fuzz") / "m.gguf"
    gguf_writer.write(FIXTURES / "tiny-textonly", path, "Q4_0", template="{{ messages }}")
    return path, path.read_bytes(), min(entry.offset for entry in read_gguf(path).tensors.values())


def test_folder_that_is_called_like_a_file_is_a_folder(tmp_path):
    """People name folders by what they convert into."""
    (tmp_path / "m.gguf").mkdir()
    assert not is_gguf(tmp_path / "m.gguf")


def outcome(path: Path, data: bytes) -> str | None:
    """Read a file as a conversion would, up to its weights: None, or the one line of the refusal."""
    path.write_bytes(data)
    try:
        with GgufCheckpoint(path) as checkpoint:
            plan_sources(checkpoint)
            checkpoint.extra_files()
    except ColiError as error:
        assert str(error).isprintable() and 0 < len(str(error)) <= 600
        return str(error)
    return None


def damage(data: bytes, end: int, rng: random.Random) -> bytes:
    """A few bytes or numbers of the header changed, moved or removed, or the end cut off."""
    raw = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at, action = rng.randrange(rng.choice((400, 2000, end))), rng.randrange(6)
        if action == 0:
            raw[at] = rng.randrange(256)
        elif action == 1:
            raw[at : at + 4] = struct.pack("<I", rng.choice((0, 1, 4, 8, 9, 12, 255, 1 << 16, (1 << 32) - 1)))
        elif action == 2:
            raw[at : at + 8] = struct.pack("<Q", rng.choice((0, 1, 2, 3, 31, 1 << 24, 1 << 40, (1 << 64) - 1)))
        elif action == 3:
            raw[at] ^= 1 << rng.randrange(8)
        elif action == 4:
            del raw[at : at + rng.randrange(1, 40)]
        else:
            raw[at:at] = raw[at : at + rng.randrange(60)]
    return bytes(raw[: rng.randrange(len(raw))] if rng.random() < 0.05 else raw)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 32))
def test_damaged_file_is_taken_or_refused_in_one_line(good, seed):
    """Whatever is wrong with a header, the outcome is success or one ColiError of one printable line."""
    path, data, end = good
    outcome(path, damage(data, end, random.Random(seed)))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_in_one_line(good, data):
    """Not even a file of its kind; with and without the right beginning."""
    path, _, _ = good
    assert outcome(path, data) is not None
    assert outcome(path, b"GGUF" + struct.pack("<I", 3) + data) is not None


def test_damage_reaches_many_refusals(good):
    """The good file is taken, and the damage is neither so mild nor so bad that it would test only one check."""
    path, data, end = good
    assert outcome(path, data) is None
    rng = random.Random(2)
    found = [outcome(path, damage(data, end, rng)) for _ in range(150)]
    assert 0 < found.count(None) < 100
    assert len({message.split(": ", 1)[-1][:24] for message in found if message}) > 12


def test_values_of_any_kind_are_taken_or_refused_in_one_line(good, tmp_path):
    """Whole headers, each with one value replaced by one of another kind or size."""
    path, source = good[0], FIXTURES / "tiny-textonly"
    odd = [("UINT32", 0), ("UINT32", (1 << 32) - 1), ("INT32", -1), ("FLOAT32", float("inf")), ("STRING", ""),
           ("STRING", "a\n\x1b[2J"), ("BOOL", True), ("UINT64", 1 << 63)]  # fmt: skip
    keys: list[str] = []
    gguf_writer.write(source, tmp_path / "k.gguf", change=lambda writer, tensors: keys.extend(writer.kv_data[0]))
    rng, refused = random.Random(3), 0
    for key in keys:
        kind, value = rng.choice(odd)

        def change(writer, tensors, key=key, kind=kind, value=value) -> None:
            del writer.kv_data[0][key]
            writer.add_key_value(key, value, gguf.GGUFValueType[kind])

        data = gguf_writer.write(source, tmp_path / "v.gguf", change=change).read_bytes()
        refused += outcome(path, data) is not None
    assert refused > 20
