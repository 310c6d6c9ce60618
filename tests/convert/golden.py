"""Weight quantisation in plain numpy: what coli/_core/src/search.c must equal, byte for byte.

Written from docs/numerics.md (sections 2 and 3) and from the rules stated in search.c, a row at a time and with
no eye on speed.  float32 operations stay float32; the sums keep search.c's sixteen lanes.
"""

from __future__ import annotations

import numpy as np

F = np.float32
DIVISORS = [7 + 0.5 * k for k in range(21)]


def to_half(value: np.float32) -> np.float16:
    """Nearest even; saturating instead of infinite."""
    with np.errstate(over="ignore"):
        half = np.float16(value)
    return np.float16(np.copysign(65504, value)) if np.isinf(half) else half


def lanes16(values: np.ndarray) -> np.float32:
    """Sum in sixteen lanes, ascending, then by halves; float32."""
    sums = np.zeros(16, F)
    for line in values.reshape(-1, 16):
        sums = sums + line
    h = 8
    while h:
        sums = sums[:h] + sums[h : 2 * h]
        h //= 2
    return sums[0]


def round_i4(x: np.ndarray, scale: np.float32) -> np.ndarray:
    return np.rint(np.minimum(np.maximum(x * (F(1) / scale), F(-8)), F(7)))


def search_i4(x: np.ndarray, half: bool) -> tuple[np.ndarray, np.float32]:
    """q in [-8, 7] and the stored scale of one group or row."""
    absmax = np.abs(x).max()
    if absmax == 0:
        return np.zeros(len(x), np.int8), F(0)
    exponent = int(np.clip(np.frexp(absmax)[1] - 1, -126, 126))
    normal, stored = F(2.0**-exponent), F(2.0**exponent)
    x = x * normal
    absmax = absmax * normal

    def as_stored(scale: np.float32) -> np.float32:
        held = scale * stored
        return (F(to_half(held)) if half else held) * normal

    best, best_error = F(0), np.inf
    for d in DIVISORS:
        for sign in (1, -1):
            scale = as_stored(absmax / F(sign * d))
            if scale == 0:
                continue
            e = x - round_i4(x, scale) * scale
            error = lanes16(e * e)
            if error < best_error:
                best, best_error = scale, error

    def exact(scale: np.float32) -> float:
        return sum((x.astype(float) - round_i4(x, scale).astype(float) * float(scale)) ** 2)

    plain = as_stored(absmax / F(7))
    if plain != 0 and exact(plain) < exact(best):
        best = plain
    if best == 0:
        return np.zeros(len(x), np.int8), F(0)
    return round_i4(x, best).astype(np.int8), best * stored


def scale_i8(x: np.ndarray, half: bool) -> tuple[np.ndarray, np.float32]:
    """q in [-127, 127] and the stored scale of one group or row."""
    absmax = np.abs(x).max()
    if absmax == 0:
        return np.zeros(len(x), np.int8), F(0)
    scale = absmax / F(127)
    if half:
        stored = to_half(scale)
        if absmax > F(127.5) * F(stored) and stored < 65504:
            stored = np.nextafter(stored, np.float16(np.inf))
        scale = F(stored)
    elif absmax > F(127.5) * scale:
        scale = np.nextafter(scale, F(np.inf))
    normal = F(2.0 ** -int(np.clip(np.frexp(absmax)[1] - 1, -126, 126)))
    return np.rint(np.clip(x * normal / (scale * normal), F(-127), F(127))).astype(np.int8), scale


def quantize_rows(w: np.ndarray, format: str) -> tuple[np.ndarray, np.ndarray]:
    """int8 (rows, padded cols) and float32 scales (rows, spans) of float32 (rows, cols)."""
    rows, cols = w.shape
    padded = -(-cols // 128) * 128
    span = 128 if format.endswith("group") else padded
    x = np.zeros((rows, padded), F)
    x[:, :cols] = w
    one = search_i4 if format.startswith("i4") else scale_i8
    q, scales = np.zeros((rows, padded), np.int8), np.zeros((rows, padded // span), F)
    for r in range(rows):
        for g in range(padded // span):
            part = slice(g * span, (g + 1) * span)
            q[r, part], scales[r, g] = one(x[r, part], format.endswith("group"))
    return q, scales


def pack(q: np.ndarray, scales: np.ndarray, format: str) -> np.ndarray:
    """R16 headed blocks, uint8."""
    rows, padded = q.shape
    blocks = -(-rows // 16)
    full = np.zeros((blocks * 16, padded), np.int8)
    full[:rows] = q
    held = np.zeros((blocks * 16, scales.shape[1]), F)
    held[:rows] = scales
    out = []
    for b in range(blocks):
        w, s = full[16 * b : 16 * b + 16], held[16 * b : 16 * b + 16]
        header = s.T.astype(np.float16).tobytes() if format.endswith("group") else s.tobytes()
        out.append(header + b"\0" * (-len(header) % 128))
        if format.startswith("i8"):
            out.append(np.ascontiguousarray(w.reshape(16, padded // 4, 4).transpose(1, 0, 2)).tobytes())
        else:
            n = (w.astype(np.int16) + 8).astype(np.uint8).reshape(16, padded // 8, 2, 4)
            out.append(np.ascontiguousarray((n[:, :, 0] | n[:, :, 1] << 4).transpose(1, 0, 2)).tobytes())
    return np.frombuffer(b"".join(out), np.uint8)


def unpack(data: np.ndarray, format: str, rows: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of pack: int8 (rows, cols), float32 scales (rows, spans)."""
    groups = -(-cols // 128)
    padded = groups * 128
    grouped = format.endswith("group")
    header = 32 * groups if grouped else 64
    header += -header % 128
    payload = padded * 16 // (2 if format.startswith("i4") else 1)
    q, scales = [], []
    for b in range(-(-rows // 16)):
        block = data[b * (header + payload) : (b + 1) * (header + payload)]
        if grouped:
            scales.append(block[: 32 * groups].view(np.float16).reshape(groups, 16).T.astype(F))
        else:
            scales.append(block[:64].view(F).reshape(16, 1))
        body = block[header:]
        if format.startswith("i8"):
            q.append(body.view(np.int8).reshape(padded // 4, 16, 4).transpose(1, 0, 2).reshape(16, padded))
        else:
            n = body.reshape(padded // 8, 16, 1, 4)
            n = np.concatenate([n & 15, n >> 4], axis=2).astype(np.int8) - 8
            q.append(n.transpose(1, 0, 2, 3).reshape(16, padded))
    return np.concatenate(q)[:rows, :cols], np.concatenate(scales)[:rows]


def dequantize(data: np.ndarray, format: str, rows: int, cols: int) -> np.ndarray:
    """float64 (rows, cols): q times scale, exact."""
    q, scales = unpack(data, format, rows, cols)
    span = 128 if format.endswith("group") else cols
    return q.astype(float) * np.repeat(scales.astype(float), span, axis=1)[:, :cols]
