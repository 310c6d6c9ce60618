"""Random-weight models on disk: a container, a Hugging Face checkpoint, a GGUF; one tensor in memory at a time.

What is not a container is written beside its place, as OUT.partial, and takes it when all of it is on the disk:
whatever is called OUT is whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from coli.container.header import make_header
from coli.container.layout import matrix_layout, slab_layout
from coli.container.manifest import Manifest
from coli.container.reader import experts_field
from coli.container.schema import EXPERT_SLABS, MATRIX, PLAIN, Entry, entries
from coli.container.writer import PARTIAL_SUFFIX, Piece, TensorPlan, check_destination, write_container
from coli.convert.synthetic import EMBED_ROWS, Synthetic, bf16_to_float32, float32_to_bf16
from coli.errors import ModelError
from coli.files import replace_file, sync

Progress = Callable[[int], None]


def _quiet(n_bytes: int) -> None:
    """No progress wanted."""


# ---- container ----------------------------------------------------------------------------------------


def write_synthetic(
    weights: Synthetic,
    name: str,
    out: str | Path,
    *,
    trunk_format: str = "i8_row",
    expert_format: str = "i4_group",
    progress: Progress = _quiet,
) -> int:
    """Write a container with random weights; returns its bytes.  Resumes like a conversion."""
    from coli import __version__

    config = weights.config
    schema = entries(config)
    manifest = Manifest(
        coli_version=__version__,
        trunk_format=trunk_format,
        expert_format=expert_format,
        kv_dtype="float16",
        tied=False,
        source={"name": f"random weights: {name}", "tensors": len(schema), "bytes": 0},
        skipped={kind: {"tensors": 0, "bytes": 0} for kind in ("mtp", "visual")},
        matrices={
            e.name: {"format": trunk_format, "rows": e.shape[0], "cols": e.shape[1]} for e in schema if e.kind == MATRIX
        },
        experts=experts_field(
            slab_layout(expert_format, config.hidden_size, config.moe_intermediate_size), config.num_experts
        ),
        files={},
        report={},
    )
    plans = [_plan(weights, entry, trunk_format, expert_format) for entry in schema]
    identity = {"synth": name, "seed": weights.seed, "skew": weights.skew, "formats": [trunk_format, expert_format]}
    extra = {"config.json": json.dumps(weights.config_dict, indent=1).encode() + b"\n"}
    return write_container(out, plans, extra, manifest, identity=identity, progress=progress).n_bytes


def _plan(weights: Synthetic, entry: Entry, trunk_format: str, expert_format: str) -> TensorPlan:
    name = entry.name
    if entry.name == "embed_tokens":
        rows, cols = entry.shape
        pieces = tuple(
            Piece(min(EMBED_ROWS, rows - first) * cols * 2, lambda first=first: weights.embed_block(first))
            for first in range(0, rows, EMBED_ROWS)
        )
        return TensorPlan(name, entry.file, "BF16", entry.shape, pieces)
    if entry.kind == PLAIN:
        n_bytes = 2 * int(np.prod(entry.shape))
        piece = Piece(n_bytes, lambda: float32_to_bf16(weights.plain(entry)))
        return TensorPlan(name, entry.file, "BF16", entry.shape, (piece,))
    if entry.kind == MATRIX:
        layout = matrix_layout(trunk_format, *entry.shape)

        def whole() -> np.ndarray:
            data = np.empty(layout.total_bytes, np.uint8)
            weights.blocks(name, layout, data, weights.generator(name))
            return data

        return TensorPlan(name, entry.file, "U8", (layout.total_bytes,), (Piece(layout.total_bytes, whole),))
    count = entry.shape[0] if entry.kind == EXPERT_SLABS else 1
    slab = slab_layout(
        expert_format if entry.kind == EXPERT_SLABS else trunk_format, entry.shape[-1], entry.shape[-2]
    )

    def expert(i: int) -> np.ndarray:
        data = np.empty(slab.total_bytes, np.uint8)
        weights.slab(name, slab, data, weights.generator(f"{name}.{i}"))
        return data

    made = tuple(Piece(slab.total_bytes, lambda i=i: expert(i)) for i in range(count))
    return TensorPlan(name, entry.file, "U8", (count * slab.total_bytes,), made)


# ---- Hugging Face checkpoint ----------------------------------------------------------------------------


def write_hf(weights: Synthetic, out: str | Path, *, progress: Progress = _quiet) -> int:
    """Write a bf16 checkpoint in the family's own names, one shard a layer; returns its bytes.

    Raises ModelError: ``out`` is there and not empty, OUT.partial is there, or the disk refuses.
    """
    config, total, index = weights.config, 0, {}
    n_files = config.num_hidden_layers + 1
    with _beside(check_destination(out)) as folder:
        folder.mkdir()
        for number in range(n_files):
            layer = None if number == 0 else number - 1
            tensors = list(_hf_tensors(weights, layer))
            file = f"model-{number + 1:05d}-of-{n_files:05d}.safetensors"
            with open(folder / file, "wb") as stream:
                stream.write(make_header([(name, "BF16", shape) for name, shape, _ in tensors], 8))
                for name, _, pieces in tensors:
                    index[name] = file
                    for piece in pieces():
                        stream.write(piece.tobytes())
                        total += piece.nbytes
                        progress(piece.nbytes)
                stream.flush()
                os.fsync(stream.fileno())
        weight_map = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
        replace_file(folder / "model.safetensors.index.json", weight_map.encode() + b"\n")
        replace_file(folder / "config.json", json.dumps(weights.config_dict, indent=1).encode() + b"\n")
    return total


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """A path beside ``out`` for what is to be there: it is renamed when the block ends, removed when it fails.

    The block leaves a file or a folder of synced files.  Raises ModelError where the path is taken or the disk refuses.
    """
    partial = out.with_name(out.name + PARTIAL_SUFFIX)
    if os.path.lexists(partial):
        raise ModelError(f"{partial}: another coli synth writes it, or one was ended; remove it if none is at work")
    try:
        try:
            yield partial
            sync(partial)
            os.replace(partial, out)
            sync(out.parent)
        except BaseException:
            shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ModelError(f"{out}: cannot be written: {error.strerror or error}") from None


def _normal(weights: Synthetic, name: str, rows: int, cols: int) -> Iterator[np.ndarray]:
    """A big matrix as bf16 payloads, at most 64 MB of float32 at a time.  Row 0 of an output matrix is zero."""
    spread, at_once = np.float32(weights.spread(name, cols)), max(1, (16 << 20) // cols)
    leaf = name.rpartition(".")[2]
    for first in range(0, rows, at_once):
        rng = weights.generator(f"hf.{name}.{first}")
        values = spread * rng.standard_normal((min(at_once, rows - first), cols), np.float32)
        if first == 0 and leaf in ("out_proj", "o_proj", "down"):
            values[0] = 0.0
        yield float32_to_bf16(values)


def _hf_tensors(
    weights: Synthetic, layer: int | None
) -> Iterator[tuple[str, tuple[int, ...], Callable[[], Iterator[np.ndarray]]]]:
    """(name, shape, pieces) of what belongs to a layer, or to none."""
    config = weights.config
    table = {e.name: e for e in entries(config)}
    hidden = config.hidden_size

    def small(ours: str, theirs: str, shape: tuple[int, ...] | None = None, rows: slice = slice(None)):
        entry = table[ours]

        def pieces() -> Iterator[np.ndarray]:
            yield float32_to_bf16(weights.plain(entry)[rows])

        full = shape or entry.shape
        return theirs, full, pieces

    def big(ours: str, theirs: str, rows: int, cols: int):
        return theirs, (rows, cols), lambda: _normal(weights, ours, rows, cols)

    if layer is None:
        yield "model.embed_tokens.weight", table["embed_tokens"].shape, weights.embed_blocks
        yield small("norm", "model.norm.weight")
        yield big("lm_head", "lm_head.weight", config.vocab_size, hidden)
        return
    p, q = f"layers.{layer}.", f"model.layers.{layer}."
    yield small(p + "input_layernorm", q + "input_layernorm.weight")
    yield small(p + "post_attention_layernorm", q + "post_attention_layernorm.weight")
    if config.layer_types[layer] == "full_attention":
        width = config.num_attention_heads * config.head_dim
        kv = config.num_key_value_heads * config.head_dim
        a = "self_attn."
        yield big(p + a + "q_proj", q + a + "q_proj.weight", 2 * width, hidden)
        yield big(p + a + "k_proj", q + a + "k_proj.weight", kv, hidden)
        yield big(p + a + "v_proj", q + a + "v_proj.weight", kv, hidden)
        yield big(p + a + "o_proj", q + a + "o_proj.weight", hidden, width)
        yield small(p + a + "q_norm", q + a + "q_norm.weight")
        yield small(p + a + "k_norm", q + a + "k_norm.weight")
    else:
        heads, values = config.linear_num_value_heads, config.linear_num_value_heads * config.linear_value_head_dim
        d = "linear_attn."
        yield big(p + d + "in_proj_qkv", q + d + "in_proj_qkv.weight", config.conv_channels, hidden)
        yield big(p + d + "in_proj_z", q + d + "in_proj_z.weight", values, hidden)
        yield big(p + d + "out_proj", q + d + "out_proj.weight", hidden, values)
        yield small(p + d + "in_proj_ba", q + d + "in_proj_b.weight", (heads, hidden), slice(0, heads))
        yield small(p + d + "in_proj_ba", q + d + "in_proj_a.weight", (heads, hidden), slice(heads, None))
        conv = (config.conv_channels, 1, config.linear_conv_kernel_dim)
        yield small(p + d + "conv1d", q + d + "conv1d.weight", conv)
        for name in ("A_log", "dt_bias"):
            yield small(p + d + name, q + d + name)
        yield small(p + d + "norm", q + d + "norm.weight")
    m = "mlp."
    experts, shared = config.moe_intermediate_size, config.shared_expert_intermediate_size
    n = config.num_experts
    yield small(p + m + "gate", q + m + "gate.weight")
    yield small(p + m + "shared_expert_gate", q + m + "shared_expert_gate.weight")
    for part, rows, cols in (("gate", shared, hidden), ("up", shared, hidden), ("down", hidden, shared)):
        yield big(f"{p}{m}shared_expert.{part}", f"{q}{m}shared_expert.{part}_proj.weight", rows, cols)

    def fused(part: str, rows: int, cols: int) -> Callable[[], Iterator[np.ndarray]]:
        def pieces() -> Iterator[np.ndarray]:
            for i in range(n):
                yield from _normal(weights, f"{p}{m}experts.{i}.{part}", rows, cols)

        return pieces

    yield q + m + "experts.gate_up_proj", (n, 2 * experts, hidden), fused("gate_up", 2 * experts, hidden)
    yield q + m + "experts.down_proj", (n, hidden, experts), fused("down", hidden, experts)


# ---- GGUF ---------------------------------------------------------------------------------------------------


def write_gguf(weights: Synthetic, out: str | Path, *, progress: Progress = _quiet) -> int:
    """Write a GGUF (architecture qwen35moe): experts Q4_0, the rest Q8_0, small tensors F32; returns its bytes.

    Needs the ``gguf`` package (extra ``bench``).  The vocabulary is made up: ids are what such a model is fed with.
    Raises ModelError: ``out`` or OUT.partial is there, or the disk refuses.
    """
    try:
        import gguf
    except ImportError:
        raise ModelError("writing GGUF needs the gguf package; install coli[bench]") from None

    out = Path(out).expanduser().resolve()
    if out.exists():
        raise ModelError(f"{out}: exists; choose another destination or remove it first")
    if not out.parent.is_dir():
        raise ModelError(f"{out.parent}: there is no such folder to write into")
    with _beside(out) as partial:
        return _write_gguf(gguf, weights, partial, progress)


def _write_gguf(gguf: Any, weights: Synthetic, path: Path, progress: Progress) -> int:
    """All of the file, with the package's writer; returns the tensors' bytes."""
    writer = gguf.GGUFWriter(path, "qwen35moe", use_temp_file=False)
    try:
        _gguf_metadata(gguf, writer, weights.config)
        q8, q4, f32 = (gguf.GGMLQuantizationType[t] for t in ("Q8_0", "Q4_0", "F32"))
        tensors = list(_gguf_tensors(weights, q8, q4, f32))
        for name, shape, kind, _ in tensors:
            stored = gguf.quant_shape_to_byte_shape(shape, kind) if kind != f32 else shape
            n_bytes = int(np.prod(stored)) * (4 if kind == f32 else 1)
            dtype = np.dtype(np.float32 if kind == f32 else np.uint8)
            writer.add_tensor_info(name, stored, dtype, n_bytes, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        total = 0
        for _, _, _, make in tensors:
            data = make()
            writer.write_tensor_data(data)
            total += data.nbytes
            progress(data.nbytes)
        return total
    finally:
        writer.close()


def _gguf_metadata(gguf: Any, writer: Any, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.moe_intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.rotary_dim)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    writer.add_full_attention_interval(4)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    writer.add_token_merges(["t 0"])  # an empty list is not written, and a missing one is refused
    writer.add_eos_token_id(0)


def _ggml_blocks(weights: Synthetic, name: str, rows: int, cols: int, bits: int) -> np.ndarray:
    """Random Q8_0 or Q4_0 blocks of 32 columns, uint8 (rows, bytes of a row): a float16 scale, then the payload."""
    payload = 32 * bits // 8
    data = np.empty((rows * cols // 32, 2 + payload), np.uint8)
    rng = weights.generator(f"gguf.{name}")
    flat = data.reshape(-1)
    words = len(flat) // 8
    flat[: words * 8].view(np.uint64)[:] = rng.integers(0, 2**64, words, np.uint64)
    scale = weights.spread(name, cols) / (73.6 if bits == 8 else 4.6)
    sign = np.where(data[:, 2] & 1, 1.0, -1.0)
    scales = (scale * sign).astype(np.float16)
    if name.rpartition(".")[2] in ("out_proj", "o_proj", "down"):
        scales[: cols // 32] = 0
    data[:, :2] = scales.view(np.uint8).reshape(-1, 2)
    return data.reshape(rows, -1)


def _gguf_tensors(weights: Synthetic, q8: Any, q4: Any, f32: Any) -> Iterator[tuple[str, tuple[int, ...], Any, Any]]:
    """(name, shape, type, maker) of every tensor, in llama.cpp's names."""
    config = weights.config
    table = {e.name: e for e in entries(config)}
    hidden = config.hidden_size

    def small(ours: str, theirs: str, change: Callable[[np.ndarray], np.ndarray] = lambda x: x):
        shape = change(np.zeros(table[ours].shape, np.float32)).shape
        return theirs, shape, f32, lambda: np.ascontiguousarray(change(weights.plain(table[ours])), np.float32)

    def big(ours: str, theirs: str, rows: int, cols: int):
        return theirs, (rows, cols), q8, lambda: _ggml_blocks(weights, ours, rows, cols, 8)

    def experts(ours: str, part: str, theirs: str, rows: int, cols: int):
        n = config.num_experts
        shape = (n, rows, cols)

        def make() -> np.ndarray:
            made = [_ggml_blocks(weights, f"{ours}.{i}.{part}", rows, cols, 4) for i in range(n)]
            return np.stack(made)

        return theirs, shape, q4, make

    def embedding() -> np.ndarray:
        """Q8_0 of the same embedding: absmax / 127 a block."""
        made = []
        for payload in weights.embed_blocks():
            values = bf16_to_float32(payload).reshape(-1, 32)
            scale = (np.abs(values).max(1) / 127).astype(np.float16)
            q = np.rint(values / np.maximum(scale.astype(np.float32), 1e-8)[:, None]).clip(-127, 127).astype(np.int8)
            block = [scale.view(np.uint8).reshape(-1, 2), q.view(np.uint8)]
            made.append(np.concatenate(block, axis=1).reshape(len(payload), -1))
        return np.concatenate(made)

    def plus_one(x: np.ndarray) -> np.ndarray:
        return x + np.float32(1)

    yield "token_embd.weight", table["embed_tokens"].shape, q8, embedding
    yield small("norm", "output_norm.weight", plus_one)
    yield big("lm_head", "output.weight", config.vocab_size, hidden)
    for layer, kind in enumerate(config.layer_types):
        p, b = f"layers.{layer}.", f"blk.{layer}."
        yield small(p + "input_layernorm", b + "attn_norm.weight", plus_one)
        yield small(p + "post_attention_layernorm", b + "post_attention_norm.weight", plus_one)
        if kind == "full_attention":
            width, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
            yield big(p + "q_proj", b + "attn_q.weight", 2 * width, hidden)
            yield big(p + "k_proj", b + "attn_k.weight", kv, hidden)
            yield big(p + "v_proj", b + "attn_v.weight", kv, hidden)
            yield big(p + "o_proj", b + "attn_output.weight", hidden, width)
            yield small(p + "self_attn.q_norm", b + "attn_q_norm.weight", plus_one)
            yield small(p + "self_attn.k_norm", b + "attn_k_norm.weight", plus_one)
        else:
            d, heads = p + "linear_attn.", config.linear_num_value_heads
            values = heads * config.linear_value_head_dim
            yield big(d + "in_proj_qkv", b + "attn_qkv.weight", config.conv_channels, hidden)
            yield big(d + "in_proj_z", b + "attn_gate.weight", values, hidden)
            yield big(d + "out_proj", b + "ssm_out.weight", hidden, values)
            yield small(d + "in_proj_ba", b + "ssm_beta.weight", lambda x, heads=heads: x[:heads])
            yield small(d + "in_proj_ba", b + "ssm_alpha.weight", lambda x, heads=heads: x[heads:])
            yield small(d + "conv1d", b + "ssm_conv1d.weight")
            yield small(d + "A_log", b + "ssm_a", lambda x: -np.exp(x))
            yield small(d + "dt_bias", b + "ssm_dt.bias")
            yield small(d + "norm", b + "ssm_norm.weight")
        m, shared, moe = p + "mlp.", config.shared_expert_intermediate_size, config.moe_intermediate_size
        yield small(m + "gate", b + "ffn_gate_inp.weight")
        yield small(m + "shared_expert_gate", b + "ffn_gate_inp_shexp.weight", lambda x: x.reshape(-1))
        yield big(m + "shared_expert.gate", b + "ffn_gate_shexp.weight", shared, hidden)
        yield big(m + "shared_expert.up", b + "ffn_up_shexp.weight", shared, hidden)
        yield big(m + "shared_expert.down", b + "ffn_down_shexp.weight", hidden, shared)
        yield experts(m + "experts", "gate", b + "ffn_gate_exps.weight", moe, hidden)
        yield experts(m + "experts", "up", b + "ffn_up_exps.weight", moe, hidden)
        yield experts(m + "experts", "down", b + "ffn_down_exps.weight", hidden, moe)
