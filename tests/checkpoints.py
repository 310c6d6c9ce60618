"""Tiny Hugging Face checkpoints of the qwen3_5_moe architecture, made on demand: four layers of noise, fixed by a seed.

``write(folder, variant)`` knows the ways in which real checkpoints differ, and the ways in which they are broken:

nested flat per_expert mixed_experts with_mtp_visual tied tied_with_head untied_rolled fp8_block float16 float32
single_file zero_expert outlier eos_split     are good and, where the name does not say otherwise, the same weights
unknown_tensor other_prefix truncated_shard fp8_noscale nan_norm nan_expert inf_head wrong_shape missing_tensor
missing_shard duplicate stray_index unlisted bad_dtype tied_other_head     must be refused
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

HIDDEN, LAYERS, EXPERTS, TOP_K, WIDTH, VOCAB = 64, 4, 8, 2, 32, 272
Q_HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
K_HEADS, V_HEADS, K_DIM, V_DIM, TAPS = 2, 4, 16, 16, 4
NESTED, FLAT = "model.language_model.", "model."
# The byte tokenizer of this vocabulary: bytes are ids 0 to 255, <|endoftext|> 256, <|im_start|> 257, <|im_end|> 258.
_TOKENIZER = Path(__file__).parent / "data" / "cases" / "tiny_nested" / "tokenizer.json"

Tensors = dict[str, np.ndarray]
Stored = dict[str, tuple[str, tuple[int, ...], bytes]]


def weights(seed: int = 7) -> Tensors:
    """Float32 weights by plain name; everything that a checkpoint of this geometry holds, fused experts."""
    random = np.random.default_rng(seed)

    def noise(*shape: int, scale: float | None = None) -> np.ndarray:
        return (random.standard_normal(shape) * (scale or shape[-1] ** -0.5)).astype(np.float32)

    made = {"embed_tokens.weight": noise(VOCAB, HIDDEN, scale=1.0), "norm.weight": noise(HIDDEN, scale=0.05)}
    for layer in range(LAYERS):
        p = f"layers.{layer}."
        made[p + "input_layernorm.weight"] = noise(HIDDEN, scale=0.05)
        made[p + "post_attention_layernorm.weight"] = noise(HIDDEN, scale=0.05)
        if layer % 4 == 3:
            made[p + "self_attn.q_proj.weight"] = noise(2 * Q_HEADS * HEAD_DIM, HIDDEN)
            made[p + "self_attn.k_proj.weight"] = noise(KV_HEADS * HEAD_DIM, HIDDEN)
            made[p + "self_attn.v_proj.weight"] = noise(KV_HEADS * HEAD_DIM, HIDDEN)
            made[p + "self_attn.o_proj.weight"] = noise(HIDDEN, Q_HEADS * HEAD_DIM)
            made[p + "self_attn.q_norm.weight"] = noise(HEAD_DIM, scale=0.05)
            made[p + "self_attn.k_norm.weight"] = noise(HEAD_DIM, scale=0.05)
        else:
            channels = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
            made[p + "linear_attn.in_proj_qkv.weight"] = noise(channels, HIDDEN)
            made[p + "linear_attn.in_proj_z.weight"] = noise(V_HEADS * V_DIM, HIDDEN)
            made[p + "linear_attn.in_proj_b.weight"] = noise(V_HEADS, HIDDEN)
            made[p + "linear_attn.in_proj_a.weight"] = noise(V_HEADS, HIDDEN)
            made[p + "linear_attn.conv1d.weight"] = noise(channels, 1, TAPS)
            made[p + "linear_attn.A_log"] = np.log(random.uniform(1, 16, V_HEADS)).astype(np.float32)
            made[p + "linear_attn.dt_bias"] = random.uniform(-4, -1, V_HEADS).astype(np.float32)
            made[p + "linear_attn.norm.weight"] = 1 + noise(V_DIM, scale=0.1)
            made[p + "linear_attn.out_proj.weight"] = noise(HIDDEN, V_HEADS * V_DIM)
        made[p + "mlp.gate.weight"] = noise(EXPERTS, HIDDEN)
        made[p + "mlp.experts.gate_up_proj"] = noise(EXPERTS, 2 * WIDTH, HIDDEN)
        made[p + "mlp.experts.down_proj"] = noise(EXPERTS, HIDDEN, WIDTH)
        made[p + "mlp.shared_expert.gate_proj.weight"] = noise(WIDTH, HIDDEN)
        made[p + "mlp.shared_expert.up_proj.weight"] = noise(WIDTH, HIDDEN)
        made[p + "mlp.shared_expert.down_proj.weight"] = noise(HIDDEN, WIDTH)
        made[p + "mlp.shared_expert_gate.weight"] = noise(1, HIDDEN)
    made["lm_head.weight"] = noise(VOCAB, HIDDEN)
    return made


def text_config(tied: bool = False) -> dict:
    return {
        "model_type": "qwen3_5_moe_text", "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "full_attention_interval": 4,
        "num_attention_heads": Q_HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "attn_output_gate": True, "linear_num_key_heads": K_HEADS, "linear_num_value_heads": V_HEADS,
        "linear_key_head_dim": K_DIM, "linear_value_head_dim": V_DIM, "linear_conv_kernel_dim": TAPS,
        "num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "norm_topk_prob": True,
        "moe_intermediate_size": WIDTH, "shared_expert_intermediate_size": WIDTH, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "tie_word_embeddings": tied, "eos_token_id": 258,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
                            "mrope_interleaved": True, "mrope_section": [2, 1, 1]},
    }  # fmt: skip


def nested_config(tied: bool = False) -> dict:
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
        "tie_word_embeddings": tied, "text_config": text_config(tied), "vision_config": {"depth": 1},
    }  # fmt: skip


# ---------------------------------------------------------------- number formats


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Bits, rounded to nearest even; a NaN stays one."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return np.where(np.isnan(x), 0x7FC0, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def e4m3_values() -> np.ndarray:
    """What the 127 non-negative finite float8 bytes stand for."""
    return np.array([(b / 8 * 2.0**-6) if b < 8 else (1 + b % 8 / 8) * 2.0 ** (b // 8 - 7) for b in range(127)])


def to_f8_blocks(x: np.ndarray, block: int = 128) -> tuple[np.ndarray, np.ndarray]:
    """Float8 bytes and bf16 bits of the scales of (rows, cols), a scale per block of both."""
    rows, cols = x.shape
    q = np.zeros(x.shape, np.uint8)
    scales = np.zeros((-(-rows // block), -(-cols // block)), np.uint16)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = np.s_[i * block : (i + 1) * block, j * block : (j + 1) * block]
            scales[i, j] = to_bf16(np.array([np.abs(x[part]).max() / 448], np.float32))[0]
            scaled = x[part] / from_bf16(scales[i, j : j + 1])[0]
            nearest = np.abs(np.abs(scaled)[..., None] - e4m3_values()).argmin(-1)
            q[part] = nearest | (np.signbit(scaled).astype(np.int64) << 7)
    return q, scales


def stored(name: str, x: np.ndarray, kind: str = "BF16") -> tuple[str, tuple[int, ...], bytes]:
    """A tensor as it lies in a file; A_log and the DeltaNet norm are float32, as in published checkpoints."""
    if kind == "BF16" and name.endswith(("A_log", "linear_attn.norm.weight")):
        kind = "F32"
    held = {"BF16": to_bf16, "F16": lambda v: v.astype(np.float16), "F32": lambda v: v.astype(np.float32)}[kind](x)
    return kind, x.shape, np.ascontiguousarray(held).tobytes()


# ---------------------------------------------------------------- files


def write_safetensors(path: Path, tensors: Stored) -> None:
    """An independent writer: the files under test are not made by the code under test."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, (kind, shape, data) in tensors.items():
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"".join(data for _, _, data in tensors.values()))


def write_folder(folder: Path, shards: dict[str, Stored], config: dict, generation: dict | None = None) -> Path:
    """Shards with an index (one file: without), config.json, generation_config.json and a tokenizer's two files."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, tensors in shards.items():
        write_safetensors(folder / file, tensors)
    if len(shards) > 1:
        weight_map = {name: file for file, tensors in shards.items() for name in tensors}
        _json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    _json(folder / "config.json", config)
    _json(folder / "generation_config.json", generation or {"eos_token_id": [258, 256], "temperature": 1.0})
    (folder / "tokenizer.json").write_bytes(_TOKENIZER.read_bytes())
    _json(folder / "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    return folder


def split_experts(tensors: Tensors, only_layers: range = range(LAYERS)) -> Tensors:
    """Fused experts of some layers as one tensor per expert and projection."""
    made = {}
    for name, x in tensors.items():
        base, _, part = name.rpartition("experts.")
        if part not in ("gate_up_proj", "down_proj") or int(name.split(".")[1]) not in only_layers:
            made[name] = x
            continue
        for e in range(EXPERTS):
            if part == "down_proj":
                made[f"{base}experts.{e}.down_proj.weight"] = x[e]
            else:
                made[f"{base}experts.{e}.gate_proj.weight"] = x[e, :WIDTH]
                made[f"{base}experts.{e}.up_proj.weight"] = x[e, WIDTH:]
    return made


def write(folder: Path, variant: str = "nested", seed: int = 7) -> Path:
    """Write the named checkpoint; returns its folder."""
    tensors, prefix, config, kind, generation = weights(seed), NESTED, nested_config(), "BF16", None
    extra: Tensors = {}
    if variant == "flat":
        prefix, config = FLAT, text_config()
    elif variant == "per_expert":
        tensors = split_experts(tensors)
    elif variant == "mixed_experts":
        tensors = split_experts(tensors, range(1, 3))
    elif variant == "with_mtp_visual":
        extra = {
            "mtp.fc.weight": np.ones((HIDDEN, 2 * HIDDEN), np.float32),
            "mtp.layers.0.mlp.experts.gate_up_proj": np.ones((EXPERTS, 2 * WIDTH, HIDDEN), np.float32),
            "mtp.norm.weight": np.zeros(HIDDEN, np.float32),
            "model.visual.patch_embed.proj.weight": np.ones((8, 3, 2, 4, 4), np.float32),
        }
    elif variant in ("tied", "tied_with_head", "tied_other_head"):
        config = nested_config(tied=True)
        head = tensors.pop("lm_head.weight")
        if variant == "tied_with_head":
            tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
        elif variant == "tied_other_head":
            tensors["lm_head.weight"] = head
    elif variant == "untied_rolled":
        tensors["lm_head.weight"] = np.roll(tensors["lm_head.weight"], 1, axis=0)
    elif variant in ("float16", "float32"):
        kind = {"float16": "F16", "float32": "F32"}[variant]
    elif variant == "zero_expert":
        tensors["layers.1.mlp.experts.gate_up_proj"][3] = 0
        tensors["layers.1.mlp.experts.down_proj"][3] = 0
        tensors["layers.2.linear_attn.in_proj_z.weight"][9] = 0
    elif variant == "outlier":
        tensors["layers.2.mlp.experts.gate_up_proj"][5, 7, 11] = 40.0
    elif variant == "eos_split":
        config["text_config"]["eos_token_id"], generation = 256, {"eos_token_id": 256}
    elif variant == "unknown_tensor":
        extra = {NESTED + "layers.0.mystery.weight": np.ones((3, 3), np.float32)}
    elif variant == "other_prefix":
        extra = {FLAT + "layers.0.mlp.gate.weight": np.ones((EXPERTS, HIDDEN), np.float32)}
    elif variant == "nan_norm":
        tensors["norm.weight"][5] = np.nan
    elif variant == "nan_expert":
        tensors["layers.2.mlp.experts.down_proj"][6, 9, 3] = np.nan
    elif variant == "inf_head":
        tensors["lm_head.weight"][200, 1] = np.inf
    elif variant == "wrong_shape":
        tensors["layers.3.self_attn.o_proj.weight"] = tensors["layers.3.self_attn.o_proj.weight"].T
    elif variant == "missing_tensor":
        del tensors["layers.1.linear_attn.dt_bias"]

    named = {(n if n == "lm_head.weight" else prefix + n): x for n, x in tensors.items()} | extra
    held = {n: stored(n, x, kind) for n, x in named.items()}
    if variant.startswith("fp8"):
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        for name, x in named.items():
            if x.ndim == 2 and name.endswith("_proj.weight"):
                q, scales = to_f8_blocks(x)
                held[name] = ("F8_E4M3", x.shape, q.tobytes())
                held[name + "_scale_inv"] = ("BF16", scales.shape, scales.tobytes())
        if variant == "fp8_noscale":
            del held[NESTED + "layers.3.self_attn.o_proj.weight_scale_inv"]
    if variant == "bad_dtype":
        held[NESTED + "norm.weight"] = ("I32", (HIDDEN,), np.zeros(HIDDEN, np.int32).tobytes())

    names = list(held)
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    shards = {
        first: {n: held[n] for n in names[: len(names) // 2]},
        second: {n: held[n] for n in names[len(names) // 2 :]},
    }
    if variant == "single_file":
        shards = {"model.safetensors": held}
    write_folder(folder, shards, config, generation)
    _break(folder, variant, shards, first, second)
    return folder


def _break(folder: Path, variant: str, shards: dict[str, Stored], first: str, second: str) -> None:
    """Damage that is not in the tensors but between the files."""
    index = folder / "model.safetensors.index.json"
    if variant == "truncated_shard":
        data = (folder / second).read_bytes()
        (folder / second).write_bytes(data[:-1000])
    elif variant == "missing_shard":
        (folder / second).unlink()
    elif variant == "duplicate":
        name = next(iter(shards[first]))
        write_safetensors(folder / second, shards[second] | {name: shards[first][name]})
    elif variant == "stray_index":
        listed = json.loads(index.read_text())
        listed["weight_map"][NESTED + "layers.9.mlp.gate.weight"] = second
        _json(index, listed)
    elif variant == "unlisted":
        listed = json.loads(index.read_text())
        del listed["weight_map"][NESTED + "norm.weight"]
        _json(index, listed)


def _json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1))
