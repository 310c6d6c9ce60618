"""R16 headed blocks and the integer product, slow and plain, written from docs/numerics.md, sections 2 and 3.

Shares no code with coli nor with tests/reference.py: the layout is written here element by element of the page.
"""

from __future__ import annotations

import numpy as np

GROUP, ROWS = 128, 16
FORMATS = ("i8_row", "i8_group", "i4_row", "i4_group")


def pack_r16(q: np.ndarray, scale: np.ndarray, format: str) -> np.ndarray:
    """Lay out integers q (rows, cols) and their scales as bytes.

    scale: float32 (rows,) for a row format, float16 (rows, ceil(cols / 128)) for a group format.
    Missing rows and columns are weight 0 (the nibble 8 of int4); their scales are 0.
    """
    int4, groups = format.startswith("i4"), -(-q.shape[1] // GROUP)
    n_blocks = -(-q.shape[0] // ROWS)
    full = np.zeros((n_blocks * ROWS, groups * GROUP), np.int64)
    full[: q.shape[0], : q.shape[1]] = q
    scales = np.zeros((n_blocks * ROWS, *scale.shape[1:]), scale.dtype)
    scales[: q.shape[0]] = scale
    out = bytearray()
    for b in range(n_blocks):
        rows, s = full[b * ROWS : (b + 1) * ROWS], scales[b * ROWS : (b + 1) * ROWS]
        if format.endswith("_group"):
            header = s.astype("<f2").T.tobytes()  # [K/128][16]
        else:
            header = s.astype("<f4").tobytes()  # [16]
        out += header + bytes(-len(header) % 128)
        if int4:
            n = rows + 8
            for j in range(groups * GROUP // 8):  # [K/8][16 rows][4 bytes]
                line = n[:, 8 * j : 8 * j + 4] | n[:, 8 * j + 4 : 8 * j + 8] << 4
                out += line.astype(np.uint8).tobytes()
        else:
            for j in range(groups * GROUP // 4):  # [K/4][16 rows][4 k]
                out += rows[:, 4 * j : 4 * j + 4].astype(np.int8).tobytes()
    return np.frombuffer(bytes(out), np.uint8)


def quantize_slow(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantise one float32 vector group by group, value by value: int8 (G, 128), float32 (G,)."""
    groups = -(-x.size // GROUP)
    x = np.concatenate([x, np.zeros(groups * GROUP - x.size, np.float32)]).reshape(groups, GROUP)
    q, scale = np.zeros((groups, GROUP), np.int8), np.zeros(groups, np.float32)
    for g in range(groups):
        m = max(int(bits) & 0x7FFFFFFF for bits in x[g].view(np.uint32))
        if m >= 0x7F800000:
            scale[g] = np.nan
        elif m >= int(np.float32(2.0**-100).view(np.uint32)):
            absmax = np.uint32(m).view(np.float32)
            scale[g] = absmax / np.float32(127)
            inverse = np.float32(127) / absmax
            q[g] = [int(np.rint(v * inverse)) for v in x[g]]
    return q, scale


def product_slow(q: np.ndarray, scale: np.ndarray, format: str, q_x: np.ndarray, s_x: np.ndarray) -> np.ndarray:
    """Rows of one token: integer dots in int64, float32 sums over groups ascending; q (rows, cols), q_x (G, 128)."""
    rows = np.zeros((q.shape[0], q_x.size), np.int64)
    rows[:, : q.shape[1]] = q
    y = np.zeros(q.shape[0], np.float32)
    for g in range(q_x.shape[0]):
        dot = (rows[:, g * GROUP : (g + 1) * GROUP] @ q_x[g].astype(np.int64)).astype(np.float32)
        if format.endswith("_group"):
            y = y + dot * (s_x[g] * scale[:, g].astype(np.float32))
        else:
            y = y + dot * s_x[g]
    return y if format.endswith("_group") else y * scale
