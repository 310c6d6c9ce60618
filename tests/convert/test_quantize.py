"""The quantiser (coli/_core/quantize.pyx, src/search.c) against plain numpy, and the bounds that it must keep."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import from_bf16, to_bf16
from convert import golden
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from coli._core import quantize
from coli.container.layout import FORMATS, matrix_layout
from coli.convert.quantize import Report

CASES = Path(__file__).parent.parent / "data" / "cases" / "quant"
BLOCK_FORMATS = ("i8_row", "i8_group", "i4_row", "i4_group")
F32, BF16, F16 = (FORMATS[name].code for name in ("f32", "bf16", "f16"))


def blocks(w: np.ndarray, format: str, source: int = F32, n_threads: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """R16 bytes and row errors of a matrix; both start poisoned."""
    out = np.full(matrix_layout(format, *w.shape).used_bytes, 0xFF, np.uint8)
    errors = np.full(len(w), np.nan, np.float32)
    assert quantize.quantize([(w, out, errors)], source, FORMATS[format].code, n_threads) is None
    return out, errors


def restored(w: np.ndarray, format: str) -> np.ndarray:
    """float64 weights as the container holds them."""
    return golden.dequantize(blocks(w, format)[0], format, *w.shape)


def hard_rows(rows: int, cols: int, seed: int = 3) -> np.ndarray:
    """Ordinary rows and all kinds that break a careless quantiser: zeros, denormals, the bf16 maximum, one value."""
    random = np.random.default_rng(seed)
    w = random.standard_t(3, (rows, cols)).astype(np.float32)
    w *= (10.0 ** random.integers(-4, 4, (rows, 1))).astype(np.float32)
    w[0] = 0
    w[1] = np.where(w[1] < 0, -1, 1) * np.float32(1e-39)
    w[2] = np.where(w[2] < 0, -1, 1) * np.float32(3.38e38)
    w[3] = w[3] * np.float32(1e-20)
    w[4] = 0
    w[4, cols // 2] = 0.5
    w[5] = random.integers(-200, 200, cols) * np.float32(2.0**-149)
    w[6] = -0.1
    w[7, ::2] = -0.0
    return w


def row_norms(difference: np.ndarray) -> np.ndarray:
    return np.sqrt((difference**2).sum(axis=1))


@pytest.mark.parametrize("format", BLOCK_FORMATS)
@pytest.mark.parametrize(("rows", "cols"), [(16, 128), (9, 64), (21, 300), (40, 512)])
def test_blocks_equal_the_plain_version_byte_for_byte(format, rows, cols):
    """Scales, nibbles, padding: what C writes is what a loop in numpy writes."""
    w = hard_rows(rows, cols)
    expected = golden.pack(*golden.quantize_rows(w, format), format)
    assert np.array_equal(blocks(w, format)[0], expected)


@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_blocks_do_not_depend_on_the_number_of_threads(format):
    """The bytes of a container do not say on which machine it was made."""
    w = hard_rows(600, 200)
    one, two, three = (blocks(w, format, n_threads=n)[0] for n in (1, 2, 3))
    assert np.array_equal(one, two) and np.array_equal(one, three)


@pytest.mark.parametrize("format", BLOCK_FORMATS)
@pytest.mark.parametrize("isa", list(quantize.ISAS)[1:])
def test_blocks_do_not_depend_on_the_instruction_set(format, isa):
    """Every instruction set that the CPU has writes the same bytes and the same row errors."""
    w = hard_rows(600, 200)
    expected, expected_errors = blocks(w, format)
    out, errors = np.zeros_like(expected), np.zeros_like(expected_errors)
    assert quantize.quantize([(w, out, errors)], F32, FORMATS[format].code, 2, isa) is None
    assert np.array_equal(out, expected) and np.array_equal(errors, expected_errors)


@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_blocks_of_16_bit_rows_are_those_of_the_rows_widened(format):
    """bf16 and float16 sources are widened exactly, row by row."""
    w = hard_rows(18, 200)
    bits = to_bf16(w)
    assert np.array_equal(blocks(bits, format, BF16)[0], blocks(from_bf16(bits), format)[0])
    half = np.clip(w, -60000, 60000).astype(np.float16)
    assert np.array_equal(blocks(half.view(np.uint16), format, F16)[0], blocks(half.astype(np.float32), format)[0])


@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_zero_and_tiny_rows_give_finite_numbers(format):
    """C22: finite scales from denormals to the bf16 maximum; zero rows are exact zeros; no row is ever -128."""
    rows = json.loads((CASES / "zero_and_tiny_rows.json").read_text())["rows"]
    w = np.array(list(rows.values()), np.float32)
    out, errors = blocks(w, format)
    q, scales = golden.unpack(out, format, *w.shape)
    assert np.isfinite(scales).all() and np.isfinite(errors).all() and q.min() >= (-127 if "i8" in format else -8)
    zero = list(rows).index("zero")
    assert not golden.dequantize(out, format, *w.shape)[zero].any() and errors[zero] == 0


def all_rows() -> np.ndarray:
    """The case's rows, hard ones and ordinary ones, one width."""
    cases = json.loads((CASES / "zero_and_tiny_rows.json").read_text())["rows"]
    outlier = json.loads((CASES / "outlier_row.json").read_text())
    w = np.concatenate([hard_rows(60, 128), np.random.default_rng(0).standard_normal((200, 128)).astype(np.float32)])
    extra = [np.resize(row, 128) for row in cases.values()] + [outlier["plain"], outlier["outlier"]]
    return np.concatenate([w, np.array(extra, np.float32)])


def test_int8_row_error_is_at_most_half_a_step():
    """C22: every |w - w'| <= scale / 2, denormals and the bf16 maximum included (up to float32's rounding)."""
    w = all_rows()
    out, _ = blocks(w, "i8_row")
    q, scales = golden.unpack(out, "i8_row", *w.shape)
    error = np.abs(w.astype(float) - q.astype(float) * scales.astype(float))
    assert (error <= scales.astype(float) * (0.5 + 2**-16)).all()


@pytest.mark.parametrize("format", ["i4_row", "i4_group"])
def test_int4_row_error_is_never_above_that_of_absmax_over_7(format):
    """C22: the search never does worse than the plain symmetric scale, row by row, in exact arithmetic."""
    w = all_rows()
    with np.errstate(over="ignore"):
        plain = np.abs(w).max(axis=1, keepdims=True) / np.float32(7)
        if format == "i4_group":  # against what float16 can hold of it
            plain = np.clip(plain, 0, 65504).astype(np.float16).astype(np.float32)
        scale = np.where(plain == 0, 1, plain.astype(float))
    naive = np.clip(np.rint(w / scale), -7, 7) * plain
    ours = row_norms(w - restored(w, format))
    assert (ours <= row_norms(w - naive)).all()


@pytest.mark.parametrize(
    ("format", "cols", "distribution", "bound"),
    [
        ("i4_group", 1024, "normal", 0.0978), ("i4_group", 1024, "t5", 0.1425),
        ("i4_row", 2048, "normal", 0.1080), ("i4_row", 2048, "t5", 0.1830), ("i8_row", 2048, "normal", 0.0085),
    ],
)  # fmt: skip
def test_error_on_known_distributions_is_that_of_the_search(format, cols, distribution, bound):
    """docs/numerics.md, section 2: 9.7 % on gaussian groups (absmax / 7: 11.7 %), 14.0 % on t(5)."""
    random = np.random.default_rng(5)
    w = random.standard_normal((512, cols)) if distribution == "normal" else random.standard_t(5, (512, cols))
    w = w.astype(np.float32)
    error = np.sqrt(((w - restored(w, format)) ** 2).sum() / (w.astype(float) ** 2).sum())
    assert 0.95 * bound < error < bound


def test_outlier_row_is_on_top_of_the_report():
    """C23: one value 300 times the spread erases its row; by relative error that row comes first and is counted."""
    case = json.loads((CASES / "outlier_row.json").read_text())
    w = np.random.default_rng(1).standard_normal((50, 128)).astype(np.float32) * np.float32(0.02)
    w[7], w[31] = case["plain"], case["outlier"]
    for format in ("i4_row", "i4_group", "i8_row"):
        report = Report()
        report.add("some.matrix", format, 100, blocks(w, format)[1])
        found = report.to_dict()
        assert found["worst_rows"][0]["tensor"] == "some.matrix" and found["worst_rows"][0]["row"] == 131
        assert found["formats"][format]["rows"] == 50 and found["formats"][format]["rows_above_bound"] == 1


def test_report_keeps_the_worst_of_many_and_survives_an_interruption():
    """Twenty rows, worst first, whatever the order in which they came; note and restore lose nothing."""
    errors = np.random.default_rng(2).permutation(500).astype(np.float32) / 1000
    whole, half = Report(), Report()
    whole.add("m", "i4_group", 0, errors)
    half.add("m", "i4_group", 0, errors[:250])
    note = json.loads(json.dumps(half.note()))
    rest = Report()
    rest.restore(note)
    rest.add("m", "i4_group", 250, errors[250:])
    assert rest.to_dict() == whole.to_dict()
    assert [row["error"] for row in whole.to_dict()["worst_rows"]] == [round(0.499 - 0.001 * k, 6) for k in range(20)]
    assert whole.to_dict()["formats"]["i4_group"]["rows_above_bound"] == 249


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_weight_that_is_not_finite_is_found(format, value):
    """The first job and row that hold one come back, so that the converter can name the tensor."""
    good, bad = hard_rows(40, 128), hard_rows(40, 128)
    bad[33, 127] = bad[21, 0] = value
    outs = [np.empty(matrix_layout(format, 40, 128).used_bytes, np.uint8) for _ in range(3)]
    jobs = [(w, out, None) for w, out in zip((good, bad, bad), outs, strict=True)]
    assert quantize.quantize(jobs, F32, FORMATS[format].code, 2) == (1, 21)


@pytest.mark.parametrize(("kind", "dtype"), [("f32", np.float32), ("bf16", np.uint16), ("f16", np.float16)])
def test_first_nonfinite_is_the_first(kind, dtype):
    """NaN and both infinities are found in each type, in any chunk; large finite values are not."""
    n, code = 200_000, FORMATS[kind].code
    if kind == "bf16":
        values = to_bf16(np.full(n, 3.38e38, np.float32))
        poison = [0x7F80, 0xFF80, 0x7FC0, 0xFF81]
    else:
        values = np.full(n, np.finfo(dtype).max, dtype)
        poison = [np.inf, -np.inf, np.nan]
    assert quantize.first_nonfinite(values, code, 2) == -1
    for bad in poison:
        for at in (n - 1, 70_001, 0):
            values[at:] = bad
            assert quantize.first_nonfinite(values, code, 2) == at
        values[:] = 0


@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_first_bad_block_finds_a_bad_scale_and_a_minus_128(format):
    """What no converter writes is what verify looks for."""
    w = hard_rows(100, 200)
    good, _ = blocks(w, format)
    layout, code = matrix_layout(format, *w.shape), FORMATS[format].code

    def bad_block(data: np.ndarray) -> int:
        return quantize.first_bad_block(data, code, layout.n_blocks, layout.n_groups, 2)

    assert bad_block(good) == -1
    spoilt = good.copy()
    if format.endswith("group"):
        spoilt[5 * layout.block_bytes :][:2] = np.array([np.inf], np.float16).view(np.uint8)
    else:
        spoilt[5 * layout.block_bytes :][:4] = np.array([np.nan], np.float32).view(np.uint8)
    assert bad_block(spoilt) == 5
    spoilt = good.copy()
    spoilt[3 * layout.block_bytes + layout.header_bytes + 17] = 0x80
    assert bad_block(spoilt) == (3 if format.startswith("i8") else -1)  # 0x80 is two lawful nibbles


@settings(max_examples=60, deadline=None)
@given(hnp.arrays(np.float32, (3, 20), elements=st.floats(allow_nan=False, allow_infinity=False, width=32)))
def test_any_finite_row_gives_finite_scales(w):
    """No finite float32 makes an infinite scale or an error that is no number, in any format."""
    for format in BLOCK_FORMATS:
        out, errors = blocks(w, format)
        _, scales = golden.unpack(out, format, *w.shape)
        assert np.isfinite(scales).all() and np.isfinite(errors).all()


def test_arguments_of_the_wrong_size_are_refused():
    """The checked half checks: a short destination or a wrong type never reaches C."""
    w, out = np.zeros((16, 128), np.float32), np.zeros(2000, np.uint8)
    with pytest.raises(ValueError, match="dst: expected a contiguous array of 2176 bytes, got 2000"):
        quantize.quantize([(w, out, None)], F32, FORMATS["i8_row"].code, 1)
    with pytest.raises(ValueError, match="does not hold values of 2 bytes"):
        quantize.quantize([(w, np.zeros(3000, np.uint8), None)], BF16, FORMATS["i8_row"].code, 1)
    with pytest.raises(ValueError, match="format 4"):
        quantize.quantize([], F32, 4, 1)
