"""The oracle itself is tested: against transformers' float32 run, against float64, and against naive loops."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import reference as ref
from conftest import FIXTURES, assert_same_bits, bits

F32 = np.float32
FORMATS = ("i8_row", "i8_group", "i4_row", "i4_group")

# ---------------------------------------------------------------- the model against transformers


def checkpoint_weights(folder: Path) -> dict:
    """A fixture's Hugging Face tensors under the container's names, all as float32."""
    raw: dict = {}
    for path in sorted(folder.glob("*.safetensors")):
        raw |= {name: ref.widen_tensor(*t) for name, t in ref.read_safetensors(path).items()}
    hf = {}
    for name, value in raw.items():
        if not name.startswith(("model.visual.", "mtp.")):
            hf[name.removeprefix("model.").removeprefix("language_model.").removesuffix(".weight")] = value
    shape = ref.Shape.from_config(json.loads((folder / "config.json").read_text()))
    weights = {name: hf[name] for name in ("embed_tokens", "norm", "lm_head") if name in hf}
    for layer in range(shape.num_hidden_layers):
        p = f"layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm", "mlp.gate", "mlp.shared_expert_gate"):
            weights[p + name] = hf[p + name]
        if p + "linear_attn.A_log" in hf:
            m = p + "linear_attn."
            weights[m + "in_proj_qkvz"] = np.concatenate([hf[m + "in_proj_qkv"], hf[m + "in_proj_z"]])
            weights[m + "in_proj_ba"] = np.concatenate([hf[m + "in_proj_b"], hf[m + "in_proj_a"]])
            weights[m + "conv1d"] = hf[m + "conv1d"][:, 0, :]
            for name in ("A_log", "dt_bias", "norm", "out_proj"):
                weights[m + name] = hf[m + name]
        else:
            m = p + "self_attn."
            weights[m + "qkv_proj"] = np.concatenate([hf[m + f"{n}_proj"] for n in "qkv"])
            for name in ("o_proj", "q_norm", "k_norm"):
                weights[m + name] = hf[m + name]
        weights[p + "mlp.shared_expert"] = ref.Slab(
            *(hf[p + f"mlp.shared_expert.{n}_proj"] for n in ("gate", "up", "down"))
        )
        weights[p + "mlp.experts"] = [expert(hf, p + "mlp.experts.", e) for e in range(shape.num_experts)]
    return weights


def expert(hf: dict, p: str, e: int) -> ref.Slab:
    if p + "gate_up_proj" in hf:
        return ref.Slab(*np.split(hf[p + "gate_up_proj"][e], 2), hf[p + "down_proj"][e])
    return ref.Slab(*(hf[p + f"{e}.{n}_proj"] for n in ("gate", "up", "down")))


@pytest.fixture(scope="module", params=["tiny-random", "tiny-textonly"])
def fixture_model(request):
    folder = FIXTURES / request.param
    config = json.loads((folder / "config.json").read_text())
    return ref.Reference(checkpoint_weights(folder), config), np.load(folder / "oracle.npz")


def prompts(oracle) -> list[str]:
    return sorted(name.removesuffix("_ids") for name in oracle.files if name.endswith("_ids"))


def test_forward_on_fixtures_matches_transformers(fixture_model):
    """Logits lie within 3e-3 of transformers' float32 run, and every routing choice is the same."""
    model, oracle = fixture_model
    for prompt in prompts(oracle):
        out = model.forward(oracle[f"{prompt}_ids"])
        expected = oracle[f"{prompt}_logits"]
        np.testing.assert_allclose(out["logits"][-len(expected) :], expected, rtol=0, atol=3e-3)
        np.testing.assert_array_equal(out["router_idx"], oracle[f"{prompt}_router_idx"])
        np.testing.assert_allclose(out["router_w"], oracle[f"{prompt}_router_w"], rtol=0, atol=1e-4)


def test_forward_on_fixtures_repeats_every_greedy_id(fixture_model):
    """Teacher-forced with the oracle's continuation, the best id at each step is the oracle's."""
    model, oracle = fixture_model
    for prompt in prompts(oracle):
        ids, greedy = oracle[f"{prompt}_ids"], oracle[f"{prompt}_greedy"]
        logits = model.forward(np.concatenate([ids, greedy[:-1]]))["logits"]
        np.testing.assert_array_equal(logits[len(ids) - 1 :].argmax(1), greedy)


def test_forward_on_fixtures_matches_every_intermediate(fixture_model):
    """Hidden states, mixer outputs, router logits, recurrent states and K/V match transformers layer by layer."""
    model, oracle = fixture_model
    prompt = next(p for p in prompts(oracle) if len(oracle[f"{p}_ids"]) == oracle["hidden"].shape[1])
    out = model.forward(oracle[f"{prompt}_ids"])
    for name in ("hidden", "mixer_out", "router_logits", "final_norm"):
        np.testing.assert_allclose(out[name], oracle[name], rtol=0, atol=3e-3, err_msg=name)
    for layer, state in out["state"].items():
        np.testing.assert_allclose(state, oracle[f"state_l{layer}"], rtol=0, atol=3e-3)
        np.testing.assert_allclose(out["conv"][layer].T, oracle[f"conv_l{layer}"][:, 1:], rtol=0, atol=3e-3)
    last = max(out["kv"])
    for name, stored in zip(("key", "value"), out["kv"][last], strict=True):
        np.testing.assert_allclose(stored.transpose(1, 0, 2), oracle[f"{name}_l{last}"], rtol=0, atol=3e-3)


def test_forward_of_a_prefix_gives_the_same_bits(fixture_model):
    """A position's logits depend on no later token, to the last bit."""
    model, oracle = fixture_model
    ids = oracle[f"{prompts(oracle)[-1]}_ids"]
    assert_same_bits(model.forward(ids[:7])["logits"], model.forward(ids)["logits"][:7])


# ---------------------------------------------------------------- functions of one value against float64


def ulp_error(found: np.ndarray, exact: np.ndarray) -> float:
    """Largest error in units of the float32 spacing at the exact value."""
    return float((np.abs(found.astype(np.float64) - exact) / np.spacing(np.abs(exact).astype(F32))).max())


@pytest.fixture(scope="module")
def values():
    """2 million floats: a stride over the bit patterns of both signs below 87, and a dense uniform part."""
    top = int(F32(87).view(np.uint32))
    pattern = np.arange(0, top, top // 500_000, dtype=np.uint32).view(F32)
    dense = np.random.default_rng(0).uniform(-87, 87, 1_000_000).astype(F32)
    return np.concatenate([pattern, -pattern, dense])


@pytest.mark.parametrize(
    ("name", "exact", "bound"),
    [
        ("exp", np.exp, 1.0),
        ("sigmoid", lambda x: 1 / (1 + np.exp(-x)), 2.5),
        ("silu", lambda x: x / (1 + np.exp(-x)), 2.5),
        ("softplus", lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))), 2.8),
    ],
)
def test_function_against_float64_stays_within_its_bound(values, name, exact, bound):
    """The largest error in ulp is the one that the contract states (0.99, 2.4, 2.4, 2.7)."""
    assert ulp_error(getattr(ref, name)(values), exact(values.astype(np.float64))) < bound


def test_exp_beyond_the_clamp_is_the_value_at_87():
    """Arguments beyond +-87, infinities too, give exp(+-87): never 0, inf or a subnormal."""
    x = np.array([-np.inf, -1e30, -87, 87, 1e30, np.inf], F32)
    y = ref.exp(x)
    assert_same_bits(y, ref.exp(np.array([-87, -87, -87, 87, 87, 87], F32)))
    assert y.min() >= np.finfo(F32).tiny and np.isfinite(y).all()


def test_exp_golden_values_are_these_bits():
    """A few results as hex: a change of the polynomial, of its order or of its reduction is seen here."""
    x = np.array([0, 1, -1, 0.5, -3.25, 10, -87, 87], F32)
    golden = [0x3F800000, 0x402DF854, 0x3EBC5AB2, 0x3FD3094C, 0x3D1ED1B4, 0x46AC14EE, 0x00B33687, 0x7E36D809]
    assert [hex(v) for v in bits(ref.exp(x))] == [hex(v) for v in golden]


# ---------------------------------------------------------------- vectorised forms against naive loops


def naive_dot32(a, b) -> np.float32:
    p = [F32(0)] * 32
    for i in range(len(a)):
        p[i % 32] = p[i % 32] + F32(a[i]) * F32(b[i])
    for h in (16, 8, 4, 2, 1):
        for j in range(h):
            p[j] = p[j] + p[j + h]
    return p[0]


@pytest.mark.parametrize("n", [1, 31, 32, 33, 100, 256])
def test_dot32_of_any_length_equals_the_loop(n):
    """The vectorised dot is the written loop, for ragged lengths too, and sum32 is its case b = 1."""
    rng = np.random.default_rng(n)
    a, b = rng.standard_normal((2, 3, n)).astype(F32)
    assert_same_bits(ref.dot32(a, b), [naive_dot32(x, y) for x, y in zip(a, b, strict=True)])
    assert_same_bits(ref.sum32(a), [naive_dot32(x, np.ones(n)) for x in a])


def test_quantize_activations_in_ordinary_groups_follows_the_written_steps():
    """Scale is absmax / 127, q is one product with 127 / absmax rounded to even, the tail is padded with zeros."""
    x = np.random.default_rng(1).standard_normal(200).astype(F32)
    q, scale = ref.quantize_activations(x)
    assert q.shape == (2, 128) and not q[1, 72:].any()
    for g, part in enumerate((x[:128], x[128:])):
        absmax = np.abs(part).max()
        assert_same_bits(scale[g], absmax / F32(127))
        expected = [int(np.rint(v * (F32(127) / absmax))) for v in part]
        assert q[g, : len(part)].tolist() == expected


def test_quantize_activations_at_the_edges():
    """Ties go to even, groups below 2^-100 become zero, 1e38 does not overflow, a NaN or inf gives a NaN scale."""
    ties = np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -0.0], F32)
    q, scale = ref.quantize_activations(ties)
    assert q[0, :8].tolist() == [127, 0, 2, 2, 0, -2, -2, 0] and scale[0] == 1
    tiny = F32(2.0**-100)
    q, scale = ref.quantize_activations(np.stack([np.full(128, np.nextafter(tiny, F32(0))), np.full(128, tiny)]))
    assert scale[0, 0] == 0 and not q[0].any() and scale[1, 0] > 0 and (q[1] == 127).all()
    q, scale = ref.quantize_activations(np.array([1e38, -1e38, 1.0], F32))
    assert q[0, :3].tolist() == [127, -127, 0] and np.isfinite(scale).all()
    for bad in (np.nan, np.inf, -np.inf):
        q, scale = ref.quantize_activations(np.array([1, bad], F32))
        assert np.isnan(scale[0]) and not q.any()


def weight_at(block: bytes, format: str, groups: int, row: int, k: int) -> tuple[int, np.floating]:
    """One weight and its scale by the byte addresses of the layout page."""
    group_scales = format.endswith("group")
    header = -(-(groups * 32 if group_scales else 64) // 128) * 128
    if format.startswith("i8"):
        q = int(np.int8(block[header + (k // 4) * 64 + row * 4 + k % 4].astype(np.int8)))
    else:
        byte = int(block[header + (k // 8) * 64 + row * 4 + k % 4])
        q = (byte >> 4 if k % 8 >= 4 else byte & 15) - 8
    if group_scales:
        at = ((k // 128) * 16 + row) * 2
        return q, block[at : at + 2].view(np.float16)[0]
    return q, block[row * 4 : row * 4 + 4].view(F32)[0]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("rows", "cols"), [(16, 128), (20, 200), (48, 640)])
def test_unpack_r16_reads_every_weight_from_its_address(format, rows, cols):
    """Every weight and scale comes from the byte that the layout gives it; padding rows are left out."""
    rng = np.random.default_rng(rows + cols)
    groups, size = -(-cols // 128), ref.block_bytes(format, cols)
    data = rng.integers(0, 0x78, ref.matrix_bytes(format, rows, cols), dtype=np.uint8)  # finite scales, no int8 -128
    packed = ref.unpack_r16(data, format, rows, cols)
    assert packed.q.shape == (rows, groups * 128) and packed.scale.dtype == F32
    for row, k in zip(rng.integers(0, rows, 300), rng.integers(0, groups * 128, 300), strict=True):
        q, scale = weight_at(data[row // 16 * size :][:size], format, groups, row % 16, k)
        assert packed.q[row, k] == q
        assert packed.scale[row, k // 128 if packed.scale.ndim == 2 else ...] == F32(scale)


@pytest.mark.parametrize(
    ("format", "cols", "size"),
    [("i4_group", 2048, 16896), ("i4_group", 512, 4224), ("i8_row", 2048, 32896), ("i8_row", 512, 8320)],
)
def test_block_bytes_are_those_of_the_contract(format, cols, size):
    """The four block sizes that the contract prints."""
    assert ref.block_bytes(format, cols) == size


@pytest.mark.parametrize("group_scales", [False, True])
def test_matmul_of_a_packed_matrix_equals_the_loop(group_scales):
    """Groups ascending; a group scale multiplies s_x first, a row scale the finished sum."""
    rng = np.random.default_rng(2)
    rows, cols, tokens = 5, 300, 3
    q = rng.integers(-127, 128, (rows, 384)).astype(np.int8)
    scale = rng.standard_normal((rows, 3) if group_scales else rows).astype(F32)
    x = rng.standard_normal((tokens, cols)).astype(F32)
    x[0, 128:256] = 0
    found = ref.matmul(ref.Packed(q, scale), x)
    q_x, s_x = ref.quantize_activations(x)
    for t in range(tokens):
        for r in range(rows):
            y = F32(0)
            for g in range(3):
                dot = F32(int(q[r, g * 128 : g * 128 + 128].astype(np.int64) @ q_x[t, g].astype(np.int64)))
                y = y + dot * (s_x[t, g] * scale[r, g]) if group_scales else y + dot * s_x[t, g]
            assert_same_bits(found[t, r], y if group_scales else y * scale[r])


def test_matmul_at_the_largest_integers_is_exact():
    """A group of 127 * 127 sums to 2,064,512, which float32 holds."""
    x = np.full((1, 128), 127, F32)
    packed = ref.Packed(np.full((16, 128), -127, np.int8), np.ones(16, F32))
    assert (ref.matmul(packed, x) == -2_064_512).all()


def test_matmul_of_a_dense_matrix_is_the_dot_of_each_row():
    """An unquantised matrix gives the 32-lane dot, whatever the cut of the rows."""
    rng = np.random.default_rng(3)
    w, x = rng.standard_normal((700, 48)).astype(F32), rng.standard_normal((70, 48)).astype(F32)
    found = ref.matmul(w, x)
    for t, r in ((0, 0), (69, 699), (33, 350)):
        assert_same_bits(found[t, r], naive_dot32(w[r], x[t]))


def naive_keys(products) -> np.float32:
    total = F32(0)
    for c in range(0, len(products), 16):
        chunk = F32(0)
        for value in products[c : c + 16]:
            chunk = chunk + value
        total = total + chunk
    return total


@pytest.mark.parametrize("dk", [16, 32, 40])
def test_deltanet_step_equals_the_loop(dk):
    """Decay, prediction, write, read: by value column, keys summed in chunks of 16."""
    rng = np.random.default_rng(dk)
    heads, dv = 2, 3
    state = rng.standard_normal((heads, dk, dv)).astype(F32)
    q, k = rng.standard_normal((2, heads, dk)).astype(F32)
    v = rng.standard_normal((heads, dv)).astype(F32)
    decay, beta = rng.uniform(0, 1, (2, heads)).astype(F32)
    new, o = ref.deltanet_step(state, q, k, v, decay, beta)
    for h in range(heads):
        for c in range(dv):
            column = [decay[h] * s for s in state[h, :, c]]
            kv = naive_keys([s * key for s, key in zip(column, k[h], strict=True)])
            d = (v[h, c] - kv) * beta[h]
            column = [s + key * d for s, key in zip(column, k[h], strict=True)]
            assert_same_bits(new[h, :, c], column)
            assert_same_bits(o[h, c], naive_keys([s * key for s, key in zip(column, q[h], strict=True)]))


def test_conv_silu_equals_the_loop():
    """Taps meet the rows oldest to newest, the last tap the current token, zeros stand before the start."""
    rng = np.random.default_rng(4)
    m, w = rng.standard_normal((6, 5)).astype(F32), rng.standard_normal((5, 4)).astype(F32)
    found = ref.conv_silu(m, w)
    for t in range(6):
        for c in range(5):
            acc = F32(0)
            for j in range(4):
                acc = acc + w[c, j] * (m[t - 3 + j, c] if t - 3 + j >= 0 else F32(0))
            assert_same_bits(found[t, c], ref.silu(acc))


@pytest.mark.parametrize("kv_dtype", [np.float16, np.float32])
def test_attention_across_chunk_borders_equals_the_loop(kv_dtype):
    """Positions on both sides of 64 and 128: an exact maximum, chunks of 64 positions, then the chunks in order."""
    rng = np.random.default_rng(5)
    n_keys, d = 131, 20
    k, v = rng.standard_normal((2, n_keys, 1, d)).astype(kv_dtype)
    q = (3 * rng.standard_normal((n_keys, 2, d))).astype(F32)
    found = ref.attention(q, k, v, np.arange(n_keys))
    scale = F32(1 / np.sqrt(20.0))
    keys, values = k.astype(F32), v.astype(F32)
    for t in (0, 1, 62, 63, 64, 65, 127, 128, 130):
        for h in range(2):
            s = np.array([naive_dot32(q[t, h], keys[i, 0]) * scale for i in range(t + 1)], F32)
            p = ref.exp(s - s.max())
            l_sum, o_sum = F32(0), np.zeros(d, F32)
            for start in range(0, t + 1, 64):
                chunk = p[start : start + 64]
                o_chunk = np.zeros(d, F32)
                for i in range(len(chunk)):
                    o_chunk = o_chunk + chunk[i] * values[start + i, 0]
                l_sum, o_sum = l_sum + naive_dot32(chunk, np.ones(len(chunk))), o_sum + o_chunk
            assert_same_bits(found[t, h], o_sum / l_sum)


def test_attention_of_a_later_call_equals_one_call():
    """Queries at positions 100..130 over the whole cache give the rows of one call over all positions."""
    rng = np.random.default_rng(6)
    k, v = rng.standard_normal((2, 131, 2, 16)).astype(F32)
    q = rng.standard_normal((131, 4, 16)).astype(F32)
    whole = ref.attention(q, k, v, np.arange(131))
    assert_same_bits(ref.attention(q[100:], k, v, np.arange(100, 131)), whole[100:])


def test_rope_turns_half_split_pairs_and_leaves_the_rest():
    """Pairs are (i, i + R/2) with float64 angles; elements past R pass unchanged."""
    x = np.random.default_rng(7).standard_normal((2, 1, 12)).astype(F32)
    cos, sin = ref.rope_tables(np.array([0, 200_000]), 8, 1e7)
    found = ref.rope(x, cos, sin)
    assert_same_bits(found[0], x[0])
    assert_same_bits(found[1, :, 8:], x[1, :, 8:])
    for i in range(4):
        angle = 200_000 * 1e7 ** (-2 * i / 8)
        c, s, a, b = F32(np.cos(angle)), F32(np.sin(angle)), x[1, 0, i], x[1, 0, i + 4]
        assert_same_bits(found[1, 0, [i, i + 4]], [a * c - b * s, b * c + a * s])


def test_route_on_ties_takes_the_lower_index():
    """Logit descending, -0 equal to +0, the lower index first; weights are e_j over their 32-lane sum."""
    logits = np.array([[1, 3, 3, -5, 3], [-0.0, 0.0, -1, -0.0, -2]], F32)
    idx, w = ref.route(logits, 3)
    assert idx.tolist() == [[1, 2, 4], [0, 1, 3]]
    assert_same_bits(w, np.full((2, 3), F32(1) / F32(3)))
    idx, w = ref.route(np.array([[0.5, 2, 1]], F32), 2)
    e = ref.exp(np.array([0, -1], F32))
    assert idx.tolist() == [[1, 2]]
    assert_same_bits(w[0], e / (e[0] + e[1]))


def test_norms_follow_the_written_order():
    """RMSNorm is (x * r) * w, L2 puts 1e-6 under the root of the sum, the gated norm multiplies silu(z) last."""
    rng = np.random.default_rng(8)
    x, w, z = rng.standard_normal((3, 48)).astype(F32)
    ss = naive_dot32(x, x)
    r = F32(1) / np.sqrt(ss / F32(48) + F32(1e-6))
    assert_same_bits(ref.rmsnorm(x, w, 1e-6), (x * r) * w)
    assert_same_bits(ref.gated_norm(x, w, z, 1e-6), ((x * r) * w) * ref.silu(z))
    assert_same_bits(ref.l2norm(x, F32(0.25)), (x * (F32(1) / np.sqrt(ss + F32(1e-6)))) * F32(0.25))


def test_widen_bf16_is_exact():
    """bfloat16 patterns become the upper half of a float32, subnormals and -0 too."""
    patterns = np.array([0x0000, 0x8000, 0x3F80, 0x0001, 0xC2F7], np.uint16)
    assert bits(ref.widen_bf16(patterns)).tolist() == [int(p) << 16 for p in patterns]
