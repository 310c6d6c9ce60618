"""The kernel tables from Python: which ones run here, and each entry as a function of arrays.

This is the checked half: shapes are verified, outputs allocated (and filled with the bit pattern of a NaN, so that
what a kernel leaves unwritten shows), the GIL released.  The engine does not come through here: it takes a table's
pointers once, from ``kernels.pxd``.  Every function takes ``isa``: a name from `available`, or None for the best.

Importing this module runs the golden self-test on the best table and refuses a build that breaks the contract.
"""

import numpy as np

FORMATS = ("i8_row", "i8_group", "i4_row", "i4_group", "f32", "bf16", "f16")
"""Names of the number formats, in the order of ``coli_format``."""

cdef const coli_kernels *table(isa) except NULL:
    cdef const coli_kernels *found
    if isa is None:
        return coli_kernels_best()
    found = coli_kernels_for(isa.encode())
    if found == NULL:
        known = "not an instruction set of this build" if isa not in compiled() else "not supported by this CPU"
        raise ValueError(f"{isa} is {known}; available: {', '.join(available())}")
    return found


cdef coli_read_xor_fn reader(const coli_kernels *k) noexcept:
    return coli_read_xor_for(k.name)


def compiled():
    """Names of the instruction sets in this build, best first; some may be missing on this CPU."""
    cdef const char *const *names = coli_kernels_compiled()
    found = []
    while names[len(found)] != NULL:
        found.append(names[len(found)].decode())
    return found


def available():
    """Names of the instruction sets that this machine runs, best first; "scalar" is always the last."""
    return [name for name in compiled() if coli_kernels_for(name.encode()) != NULL]


def best():
    """Name of the table that is used when none is asked for."""
    return coli_kernels_best().name.decode()


def fp_mode_ok():
    """Whether the calling thread rounds to nearest even and keeps subnormals."""
    return bool(coli_fp_mode_ok())


def selftest(isa=None):
    """Run the golden self-test; returns None, or the name of the first entry that breaks the contract."""
    cdef const char *failed = coli_selftest(table(isa))
    return None if failed == NULL else failed.decode()


def selftest_checksums(isa=None):
    """The checksum of each step of the self-test, for recording them in simd/selftest.h."""
    cdef uint32_t sums[COLI_SELFTEST_STEPS]
    return [sums[i] for i in range(coli_selftest_checksums(table(isa), sums))]


# ---- arrays -----------------------------------------------------------------------------------------


def _poisoned(shape, dtype=np.float32):
    """A new array, 64-byte aligned, every byte 0xff."""
    dtype = np.dtype(dtype)
    n_bytes = int(np.prod(shape)) * dtype.itemsize
    raw = np.full(n_bytes + 64, 0xFF, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + n_bytes].view(dtype).reshape(shape)


def _f32(x, *, ndim=None, name="x"):
    x = np.ascontiguousarray(x, np.float32)
    if ndim is not None and x.ndim != ndim:
        raise ValueError(f"{name} has {x.ndim} dimensions, expected {ndim}")
    return x


def _same(a, b, what):
    if a != b:
        raise ValueError(f"{what}: {a} and {b} differ")


cdef int _format_index(format, bint blocks) except -1:
    index = FORMATS.index(format) if format in FORMATS else -1
    if index < 0 or (index <= COLI_I4_GROUP) != blocks:
        known = FORMATS[:4] if blocks else FORMATS[4:]
        raise ValueError(f"{format!r} is no format here; expected one of {', '.join(known)}")
    return index


cdef float *_ptr(float[::1] x) noexcept:
    return &x[0] if x.shape[0] else NULL


cdef float *_data(x) except? NULL:
    """The values of a C-contiguous float32 array of any shape."""
    return _ptr(x.reshape(-1))


# ---- integer products -------------------------------------------------------------------------------


cdef void _bind_acts(coli_acts *a, q, scale, sum) except *:
    cdef int8_t[:, :, ::1] q_view = q
    cdef float[:, ::1] scale_view = scale
    cdef int32_t[:, ::1] sum_view = sum
    groups, tokens, width = q.shape
    _same(width, COLI_GROUP, "columns of a group")
    _same((groups, tokens), scale.shape, "groups and tokens of q and scale")
    _same((groups, tokens), sum.shape, "groups and tokens of q and sum")
    if groups == 0 or tokens == 0:
        raise ValueError("no activations: q has shape %s" % (q.shape,))
    a.q = &q_view[0, 0, 0]
    a.scale = &scale_view[0, 0]
    a.sum = &sum_view[0, 0]
    a.stride = tokens
    a.n_groups = groups


def quantize(x, *, n_groups=None, isa=None):
    """Quantise activations by groups of 128 columns (docs/numerics.md, section 2).

    Parameters
    ----------
    x : float32, (T, K)
    n_groups : int, optional
        Groups to fill; columns past K are zeros.  Default ceil(K / 128).

    Returns
    -------
    q : int8, (G, T, 128)
    scale : float32, (G, T)
    sum : int32, (G, T)
        Integer sums of the groups of q.
    magnitude : uint32, (T,)
        Largest bits(x) & 0x7fffffff of each row; 0x7f800000 and above is a NaN or an infinity.
    """
    cdef const coli_kernels *k = table(isa)
    cdef coli_acts a
    cdef int t
    x = _f32(x, ndim=2)
    n_tokens, cols = x.shape
    groups = -(-cols // COLI_GROUP) if n_groups is None else n_groups
    if groups * COLI_GROUP < cols:
        raise ValueError(f"{groups} groups hold {groups * COLI_GROUP} columns, x has {cols}")
    q = _poisoned((groups, n_tokens, COLI_GROUP), np.int8)
    scale = _poisoned((groups, n_tokens))
    sum = _poisoned((groups, n_tokens), np.int32)
    magnitude = np.empty(n_tokens, np.uint32)
    _bind_acts(&a, q, scale, sum)
    for t in range(n_tokens):
        magnitude[t] = k.quantize(_data(x[t]), cols, &a, t)
    return q, scale, sum, magnitude


def quantize_groups(x, g0, g1, q, scale, sum, token, *, isa=None):
    """Quantise the groups [g0, g1) of one row x (K,) into ``token`` of q, scale and sum; returns the magnitude."""
    cdef coli_acts a
    x = _f32(x, ndim=1)
    _bind_acts(&a, q, scale, sum)
    if not (0 <= g0 <= g1 <= a.n_groups and 0 <= token < a.stride):
        raise ValueError(f"groups [{g0}, {g1}) of token {token} are outside q, which has shape {q.shape}")
    return table(isa).quantize_groups(_data(x), x.shape[0], &a, token, g0, g1)


cdef void _bind_matrix(coli_matrix *m, blocks, format, rows, cols) except *:
    cdef const uint8_t[::1] view = blocks
    cdef int index = _format_index(format, True)
    m.format = index
    m.rows = rows
    m.cols = cols
    m.n_groups = -(-cols // COLI_GROUP)
    m.n_blocks = -(-rows // COLI_BLOCK_ROWS)
    m.block_bytes = coli_header_bytes(index, m.n_groups) + coli_payload_bytes(index, m.n_groups)
    if m.n_blocks < 1 or m.n_groups < 1 or view.shape[0] < m.n_blocks * m.block_bytes:
        needed = m.n_blocks * m.block_bytes
        raise ValueError(f"{format} ({rows}, {cols}) takes {needed} bytes, blocks has {view.shape[0]}")
    m.data = &view[0]


def matrix_bytes(format, rows, cols):
    """Bytes of a matrix of R16 blocks."""
    cdef int index = _format_index(format, True)
    groups = -(-cols // COLI_GROUP)
    return -(-rows // COLI_BLOCK_ROWS) * (coli_header_bytes(index, groups) + coli_payload_bytes(index, groups))


def gemv(blocks, format, rows, cols, q, scale, sum, *, isa=None):
    """Multiply R16 blocks by quantised tokens, one token at a time: float32 (T, rows).

    blocks : uint8, (matrix_bytes(format, rows, cols),), in R16 order.
    q, scale, sum : what `quantize` returns for (T, cols).
    """
    cdef const coli_kernels *k = table(isa)
    cdef coli_matrix m
    cdef coli_acts a
    cdef int t
    cdef float *y
    cdef int64_t y_stride
    _bind_matrix(&m, blocks, format, rows, cols)
    _bind_acts(&a, q, scale, sum)
    _same(m.n_groups, a.n_groups, "groups of the matrix and of the activations")
    out = _poisoned((a.stride, m.n_blocks * COLI_BLOCK_ROWS))
    y, y_stride = _data(out), out.shape[1]
    with nogil:
        for t in range(a.stride):
            coli_walk_gemv(k, &m, &a, t, 0, m.n_blocks, y + t * y_stride)
    return out[:, :rows]


def gemm(blocks, format, rows, cols, q, scale, sum, *, tokens=None, isa=None):
    """`gemv` for many tokens at once.  tokens : int32 (N,), optional, picks tokens of q in any order: (N, rows)."""
    cdef const coli_kernels *k = table(isa)
    cdef coli_matrix m
    cdef coli_acts a
    cdef const int32_t[::1] list_view
    cdef const int32_t *list = NULL
    cdef int n_tokens
    cdef float *y
    cdef int64_t y_stride
    cdef uint8_t[::1] scratch
    _bind_matrix(&m, blocks, format, rows, cols)
    _bind_acts(&a, q, scale, sum)
    _same(m.n_groups, a.n_groups, "groups of the matrix and of the activations")
    n_tokens = a.stride
    if tokens is not None:
        tokens = np.ascontiguousarray(tokens, np.int32)
        if tokens.size == 0 or tokens.min() < 0 or tokens.max() >= a.stride:
            raise ValueError(f"tokens must name 1 or more of the {a.stride} tokens of q")
        list_view = tokens
        list = &list_view[0]
        n_tokens = tokens.size
    scratch = _poisoned(coli_gemm_scratch_bytes(m.n_groups), np.uint8)
    out = _poisoned((n_tokens, m.n_blocks * COLI_BLOCK_ROWS))
    y, y_stride = _data(out), out.shape[1]
    with nogil:
        coli_walk_gemm(k, &m, &a, list, n_tokens, 0, m.n_blocks, y, y_stride, &scratch[0])
    return out[:, :rows]


def read_xor(data, *, streams=4, isa=None):
    """Xor ``data`` (uint8) in ``streams`` equal parts read side by side, as a GEMV reads; the yardstick of its speed.

    Bytes past the last whole 64 of each part are left out.
    """
    cdef const uint8_t[::1] view = data
    cdef const uint8_t *parts[COLI_STREAMS]
    cdef coli_read_xor_fn read = coli_read_xor_for(table(isa).name)
    cdef int n = streams, s
    cdef int64_t part
    cdef uint64_t x
    if not 1 <= n <= COLI_STREAMS:
        raise ValueError(f"streams is {streams}, expected 1 to {COLI_STREAMS}")
    part = view.shape[0] // n // 64 * 64
    for s in range(n):
        parts[s] = &view[0] + s * part if part else NULL
    with nogil:
        x = read(parts, n, part)
    return x


# ---- float32 entries ----------------------------------------------------------------------------------


cdef _map(coli_map_fn fn, x):
    x = _f32(x)
    y = _poisoned(x.shape)
    fn(_data(x), _data(y), x.size)
    return y


def exp(x, *, isa=None):
    """e^x of each value, the contract's own (section 4)."""
    return _map(table(isa).exp_, x)


def sigmoid(x, *, isa=None):
    """1 / (1 + exp(-x)) of each value."""
    return _map(table(isa).sigmoid, x)


def silu(x, *, isa=None):
    """x / (1 + exp(-x)) of each value."""
    return _map(table(isa).silu, x)


def softplus(x, *, isa=None):
    """log(1 + exp(x)) of each value."""
    return _map(table(isa).softplus, x)


def dot32(a, b, *, isa=None):
    """Product of two float32 vectors in 32 lanes and a tree."""
    a, b = _f32(a, ndim=1, name="a"), _f32(b, ndim=1, name="b")
    _same(a.shape, b.shape, "shapes of a and b")
    return np.float32(table(isa).dot32(_data(a), _data(b), a.size))


def dense(w, x, *, isa=None):
    """Rows of x (T, K) times the rows of w (R, K): float32 (T, R).  w is float32, float16, or uint16 for bfloat16."""
    cdef const uint8_t[::1] bytes_view
    w, x = np.ascontiguousarray(w), _f32(x, ndim=2)
    if w.ndim != 2:
        raise ValueError(f"w has {w.ndim} dimensions, expected 2")
    _same(w.shape[1], x.shape[1], "columns of w and x")
    y = _poisoned((x.shape[0], w.shape[0]))
    bytes_view = w.reshape(-1).view(np.uint8)
    table(isa).dense[_row_major_index(w)](&bytes_view[0], w.shape[1] * w.itemsize, w.shape[1], 0, w.shape[0], _data(x),
                                          x.shape[1], x.shape[0], _data(y), w.shape[0])
    return y


def widen(src, *, isa=None):
    """Float32 values of a float32, float16, or uint16 (bfloat16) array, exactly."""
    cdef const uint8_t[::1] bytes_view
    src = np.ascontiguousarray(src)
    y = _poisoned(src.shape)
    bytes_view = src.reshape(-1).view(np.uint8)
    table(isa).widen[_row_major_index(src)](&bytes_view[0], _data(y), src.size)
    return y


def _row_major_index(x):
    kinds = {"float32": "f32", "uint16": "bf16", "float16": "f16"}
    if x.dtype.name not in kinds:
        raise ValueError(f"dtype is {x.dtype}, expected float32, float16, or uint16 for bfloat16")
    return _format_index(kinds[x.dtype.name], False) - COLI_F32


def to_f16(x, *, isa=None):
    """Round float32 values to float16, ties to even."""
    cdef uint16_t[::1] bits
    x = _f32(x)
    y = _poisoned(x.shape, np.uint16)
    bits = y.reshape(-1)
    table(isa).to_f16(_data(x), &bits[0], x.size)
    return y.view(np.float16)


def rmsnorm(x, w, eps, *, isa=None):
    """RMSNorm of one vector: ``(x * (1 / sqrt(sum(x*x) / n + eps))) * w``."""
    x, w = _f32(x, ndim=1), _f32(w, ndim=1, name="w")
    _same(x.shape, w.shape, "shapes of x and w")
    y = _poisoned(x.shape)
    table(isa).rmsnorm(_data(x), _data(w), x.size, eps, _data(y))
    return y


def l2norm(x, scale, *, isa=None):
    """``x * (1 / sqrt(sum(x*x) + 1e-6)) * scale`` of one vector."""
    x = _f32(x, ndim=1)
    y = _poisoned(x.shape)
    table(isa).l2norm(_data(x), x.size, scale, _data(y))
    return y


def gated_rmsnorm(o, z, w, eps, *, isa=None):
    """``rmsnorm(o, w) * silu(z)`` of one vector."""
    o, z, w = _f32(o, ndim=1, name="o"), _f32(z, ndim=1, name="z"), _f32(w, ndim=1, name="w")
    _same(o.shape, z.shape, "shapes of o and z")
    _same(o.shape, w.shape, "shapes of o and w")
    y = _poisoned(o.shape)
    table(isa).gated_rmsnorm(_data(o), _data(z), _data(w), o.size, eps, _data(y))
    return y


def silu_mul(gate, up, *, isa=None):
    """silu(gate) * up."""
    gate, up = _f32(gate, name="gate"), _f32(up, name="up")
    _same(gate.shape, up.shape, "shapes of gate and up")
    h = _poisoned(gate.shape)
    table(isa).silu_mul(_data(gate), _data(up), _data(h), gate.size)
    return h


def add(x, y, *, isa=None):
    """x + y as a new array."""
    x, y = np.array(x, np.float32), _f32(y, name="y")
    _same(x.shape, y.shape, "shapes of x and y")
    table(isa).add(_data(x), _data(y), x.size)
    return x


def axpy(w, y, out=None, *, isa=None):
    """``out + w * y`` as a new array; without ``out``, ``w * y``."""
    y = _f32(y, name="y")
    if out is None:
        result = _poisoned(y.shape)
        table(isa).axpy_set(w, _data(y), _data(result), y.size)
        return result
    result = np.array(out, np.float32)
    _same(result.shape, y.shape, "shapes of out and y")
    table(isa).axpy(w, _data(y), _data(result), y.size)
    return result


def mul_sigmoid(o, gate, *, isa=None):
    """o * sigmoid(gate) as a new array."""
    o, gate = np.array(o, np.float32), _f32(gate, name="gate")
    _same(o.shape, gate.shape, "shapes of o and gate")
    table(isa).mul_sigmoid(_data(o), _data(gate), o.size)
    return o


def conv_silu(rows, w, *, isa=None):
    """Depthwise convolution and silu of one token: rows and w (taps, C), oldest first.  Returns (C,)."""
    cdef const float *pointers[64]
    rows, w = _f32(rows, ndim=2, name="rows"), _f32(w, ndim=2, name="w")
    _same(rows.shape, w.shape, "shapes of rows and w")
    if rows.shape[0] > 64:
        raise ValueError(f"{rows.shape[0]} taps, at most 64")
    for i in range(rows.shape[0]):
        pointers[i] = _data(rows[i])
    y = _poisoned(rows.shape[1])
    table(isa).conv_silu(pointers, _data(w), rows.shape[1], rows.shape[0], 0, rows.shape[1], _data(y))
    return y


def deltanet(state, q, k, v, decay, beta, *, isa=None):
    """One token of one head: state (dk, dv), q and k (dk,), v (dv,).  Returns the new state and o (dv,)."""
    state = np.array(state, np.float32, order="C")
    q, k, v = _f32(q, ndim=1, name="q"), _f32(k, ndim=1, name="k"), _f32(v, ndim=1, name="v")
    _same(state.shape, (k.size, v.size), "shape of the state and sizes of k and v")
    _same(q.size, k.size, "sizes of q and k")
    o = _poisoned(v.shape)
    table(isa).deltanet(_data(state), k.size, v.size, _data(q), _data(k), _data(v), decay, beta, _data(o))
    return state, o


def rope(x, cos, sin, *, isa=None):
    """Rotate the pairs (i, i + half) of the first 2 * half values of x; cos and sin (half,).  A new array."""
    x = np.array(x, np.float32)
    cos, sin = _f32(cos, ndim=1, name="cos"), _f32(sin, ndim=1, name="sin")
    _same(cos.size, sin.size, "sizes of cos and sin")
    if x.ndim != 1 or x.size < 2 * cos.size:
        raise ValueError(f"x has shape {x.shape}, expected one dimension of at least {2 * cos.size}")
    table(isa).rope(_data(x), _data(cos), _data(sin), cos.size)
    return x


def _chunk(kv, d, name):
    """Keys or values of one chunk, and 0 for float32, 1 for float16."""
    kv = np.ascontiguousarray(kv)
    if kv.dtype.name not in ("float32", "float16") or kv.ndim != 2 or not 1 <= kv.shape[0] <= 64:
        raise ValueError(f"{name} is {kv.dtype} {kv.shape}, expected float32 or float16 (1 to 64, d)")
    if d is not None:
        _same(kv.shape[1], d, f"columns of {name} and of q")
    return kv, int(kv.dtype.name == "float16")


def attn_scores(q, keys, scale, *, isa=None):
    """``dot32(q, key) * scale`` for the keys (n, d) of one chunk, n <= 64: float32 (n,)."""
    cdef const uint8_t[::1] view
    q = _f32(q, ndim=1, name="q")
    keys, kind = _chunk(keys, q.size, "keys")
    s = _poisoned(keys.shape[0])
    view = keys.reshape(-1).view(np.uint8)
    table(isa).attn_scores[<int>kind](_data(q), &view[0], keys.shape[0], q.size, scale, _data(s))
    return s


def attn_values(s, values, max, *, isa=None):
    """``p = exp(s - max)`` of one chunk: its 32-lane sum, p, and the sum of p * value (d,), values (n, d)."""
    cdef const uint8_t[::1] view
    values, kind = _chunk(values, None, "values")
    s = np.array(s, np.float32)
    _same(s.shape, (values.shape[0],), "shape of s and positions of values")
    o = _poisoned(values.shape[1])
    view = values.reshape(-1).view(np.uint8)
    total = table(isa).attn_values[<int>kind](_data(s), &view[0], s.size, o.size, max, _data(o))
    return np.float32(total), s, o


def router(logits, top_k, *, isa=None):
    """The ``top_k`` largest logits (n,), best first, ties to the lower index, and their softmax: int32, float32."""
    cdef int32_t[::1] idx_view
    logits = _f32(logits, ndim=1, name="logits")
    if not 1 <= top_k <= logits.size:
        raise ValueError(f"top_k is {top_k}, expected 1 to {logits.size}")
    idx, w = _poisoned(top_k, np.int32), _poisoned(top_k)
    idx_view = idx
    table(isa).router(_data(logits), logits.size, top_k, &idx_view[0], _data(w))
    return idx, w


_failed = selftest()
if _failed is not None:
    raise RuntimeError(
        f"this build breaks the numerics contract: {_failed} of the {best()} kernels returns other bits than recorded; "
        "build with -ffp-contract=off and without -ffast-math"
    )
