"""coli/convert/checkpoint.py: which folders are checkpoints, and what their rows are."""

from __future__ import annotations

import checkpoints
import numpy as np
import pytest

from coli.convert.checkpoint import Checkpoint
from coli.convert.plan import plan_sources
from coli.errors import ModelError


def rows(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """A whole tensor as float32."""
    tensor = checkpoint.tensors[name]
    out = np.empty((tensor.n_bytes // tensor.row_bytes, tensor.cols), np.float32)
    checkpoint.read_rows(tensor, 0, out)
    return out.reshape(tensor.shape)


@pytest.mark.parametrize("variant", ["nested", "flat", "single_file", "float16", "float32"])
def test_rows_are_the_stored_values(tmp_path, variant):
    """Whatever the prefix, the shards and the type, a tensor has one plain name and its exact values."""
    folder = checkpoints.write(tmp_path / "hf", variant)
    kinds = {"float16": np.float16, "float32": np.float32}
    with Checkpoint(folder) as checkpoint:
        for name, x in checkpoints.weights().items():
            if variant in kinds:
                expected = x.astype(kinds[variant]).astype(np.float32)
            elif name.endswith(("A_log", "linear_attn.norm.weight")):
                expected = x
            else:
                expected = checkpoints.from_bf16(checkpoints.to_bf16(x))
            assert np.array_equal(rows(checkpoint, name), expected), name
        assert checkpoint.bytes_read == checkpoint.n_bytes


def test_float8_rows_are_value_times_block_scale(tmp_path):
    """C19: each weight is its float8 value times its block's scale, one rounded product; blocks may be ragged."""
    folder = checkpoints.write(tmp_path / "hf", "fp8_block")
    name = "layers.3.self_attn.q_proj.weight"
    x = checkpoints.weights()[name]  # (256, 64): two blocks of rows, half a block of columns
    q, scales = checkpoints.to_f8_blocks(x)
    table = checkpoints.e4m3_values().astype(np.float32)
    value = np.where(q >> 7, -1, 1).astype(np.float32) * table[q & 127]
    scale = np.repeat(np.repeat(checkpoints.from_bf16(scales), 128, 0), 128, 1)[: x.shape[0], : x.shape[1]]
    with Checkpoint(folder, n_threads=2) as checkpoint:
        found = rows(checkpoint, name)
        assert np.array_equal(found, value * scale)
        part = np.empty((5, x.shape[1]), np.float32)
        checkpoint.read_rows(checkpoint.tensors[name], 77, part)
        assert np.array_equal(part, found[77:82])
        for plain, w in checkpoints.weights().items():
            bound = np.abs(w).max() / 448 / 1024
            assert (np.abs(rows(checkpoint, plain) - w) <= 0.066 * np.abs(w) + bound).all(), plain


def test_float8_scales_of_fused_experts_are_per_expert(tmp_path):
    """Rows of expert e meet the scales of expert e, also where its rows are no multiple of the block."""
    experts, n, cols = 3, 130, 70
    x = np.random.default_rng(0).standard_normal((experts, n, cols)).astype(np.float32)
    x *= np.array([1, 100, 10000], np.float32)[:, None, None]
    packed = [checkpoints.to_f8_blocks(matrix) for matrix in x]
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {
        "model.embed_tokens.weight": ("BF16", (1, 2), b"\0" * 4),
        name: ("F8_E4M3", x.shape, b"".join(q.tobytes() for q, _ in packed)),
        name + "_scale_inv": ("BF16", (experts, 2, 1), b"".join(s.tobytes() for _, s in packed)),
    }
    checkpoints.write_folder(tmp_path / "hf", {"model.safetensors": tensors}, checkpoints.text_config())
    with Checkpoint(tmp_path / "hf") as checkpoint:
        tensor = checkpoint.tensors["layers.0.mlp.experts.gate_up_proj"]
        for e in range(experts):
            out = np.empty((n, cols), np.float32)
            checkpoint.read_rows(tensor, e * n, out)
            assert np.abs(out - x[e]).max() <= 0.066 * np.abs(x[e]).max()


def test_mtp_and_visual_tensors_are_left_out_and_counted(tmp_path):
    """C14: by these two names only, with their number and bytes."""
    with Checkpoint(checkpoints.write(tmp_path / "hf", "with_mtp_visual")) as checkpoint:
        sizes = {"mtp": (64 * 128 + 8 * 64 * 64 + 64) * 2, "visual": 8 * 3 * 2 * 4 * 4 * 2}
        assert checkpoint.skipped == {
            "mtp": {"tensors": 3, "bytes": sizes["mtp"]},
            "visual": {"tensors": 1, "bytes": sizes["visual"]},
        }
        assert not [name for name in checkpoint.tensors if "mtp" in name or "visual" in name]


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("unknown_tensor", "tensor model.language_model.layers.0.mystery.weight is unknown"),
        ("other_prefix", "tensor model.layers.0.mlp.gate.weight is unknown"),
        (
            "truncated_shard",
            r"model-00002-of-00002.safetensors: is cut off: its header says \d+ bytes, the file has \d+",
        ),
        ("fp8_noscale", "o_proj.weight is F8_E4M3 and .*o_proj.weight_scale_inv is missing"),
        ("wrong_shape", r"o_proj.weight has shape \[128, 64\]; config.json makes it \[64, 128\]"),
        ("missing_tensor", r"tensor layers.1.linear_attn.dt_bias is missing"),
        ("missing_shard", "model-00002-of-00002.safetensors: missing; model.safetensors.index.json names it"),
        ("duplicate", "embed_tokens.weight is also in model-00001-of-00002.safetensors"),
        ("stray_index", "layers.9.mlp.gate.weight' is not in it, though model.safetensors.index.json says so"),
        ("unlisted", "tensor model.language_model.norm.weight is not in model.safetensors.index.json"),
        ("bad_dtype", "norm.weight is I32; coli reads F32, BF16, F16 and F8_E4M3"),
    ],
)
def test_broken_checkpoint_is_refused_before_a_weight_is_read(tmp_path, variant, expected):
    """C14, C15, C19: one line with the file and the tensor, and no weight read."""
    folder = checkpoints.write(tmp_path / "hf", variant)
    with pytest.raises(ModelError, match=expected) as caught, Checkpoint(folder) as checkpoint:
        plan_sources(checkpoint)
        assert checkpoint.bytes_read == 0
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


@pytest.mark.parametrize("name", ["../../etc/x", "/etc/x", "x" * 300, "a\\u0000b", "a\\nb", "\\ud800"])
def test_index_that_names_no_file_of_the_folder_is_refused(tmp_path, name):
    """A weight_map is data from strangers: it names files of the folder, as any system takes them, and nothing else."""
    folder = checkpoints.write(tmp_path / "hf", "nested")
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00002-of-00002.safetensors", f"{name}.safetensors"))
    with pytest.raises(ModelError, match="which is no safetensors file of the folder"):
        Checkpoint(folder)


def test_folder_without_tensors_says_what_it_looked_for(tmp_path):
    """No shard, or several without an index."""
    folder = checkpoints.write(tmp_path / "hf", "nested")
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match="index.json: missing; the folder has 2 safetensors files"):
        Checkpoint(folder)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ModelError, match="no model.safetensors and no model.safetensors.index.json in it"):
        Checkpoint(folder)


def test_experts_both_fused_and_single_are_refused(tmp_path):
    """Two sources of one weight: the one that would be ignored is named."""
    tensors = checkpoints.weights()
    both = tensors | checkpoints.split_experts(tensors, range(1))
    held = {f"model.{n}" if n != "lm_head.weight" else n: checkpoints.stored(n, x) for n, x in both.items()}
    checkpoints.write_folder(tmp_path / "hf", {"model.safetensors": held}, checkpoints.text_config())
    with (
        Checkpoint(tmp_path / "hf") as checkpoint,
        pytest.raises(ModelError, match="experts.0.gate_proj.weight is unknown"),
    ):
        plan_sources(checkpoint)


def test_file_that_shrinks_while_it_is_read_is_an_error_with_a_name(tmp_path):
    """The reason for plain reads: no SIGBUS."""
    folder = checkpoints.write(tmp_path / "hf", "single_file")
    with Checkpoint(folder) as checkpoint:
        tensor = checkpoint.tensors["lm_head.weight"]
        with open(folder / "model.safetensors", "r+b") as file:
            file.truncate(tensor.offset + 100)
        with pytest.raises(ModelError, match="tensor lm_head.weight ends .* bytes early"):
            rows(checkpoint, "lm_head.weight")
