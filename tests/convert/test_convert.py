"""coli/convert/convert.py: a checkpoint goes in, its container comes out, or one line says why not."""

from __future__ import annotations

import json
from pathlib import Path

import checkpoints
import numpy as np
import pytest
from checkpoints import from_bf16, to_bf16
from convert import golden

from coli.container.layout import FORMATS
from coli.container.reader import Container, Slabs, widen
from coli.container.verify import verify
from coli.convert.convert import convert
from coli.errors import ModelError, RequestError


def converted(folder: Path, variant: str, **options) -> Container:
    src = folder / f"hf-{variant}"
    if not src.exists():
        checkpoints.write(src, variant)
    dst = folder / f"{variant}{''.join(f'-{v}' for v in options.values())}"
    convert(src, dst, **options)
    return Container.open(dst)


def tensor_bytes(container: Container) -> dict[str, bytes]:
    return {
        name: (container.path / t.entry.file).read_bytes()[t.place.offset : t.place.offset + t.place.n_bytes]
        for name, t in container.tensors.items()
    }


def matrix_values(container: Container, name: str) -> np.ndarray:
    """float64 (rows, cols) as the container holds them."""
    m = container.matrix(name)
    if FORMATS[m.format].is_blocks:
        return golden.dequantize(m.data, m.format, m.rows, m.cols)
    return widen(m.data[: m.n_blocks * m.block_bytes], m.format).reshape(m.rows, m.cols).astype(float)


def slab_part(slabs: Slabs, expert: int, part: str) -> np.ndarray:
    layout = getattr(slabs, part)
    start = expert * slabs.stride_bytes + getattr(slabs, f"{part}_offset")
    data = slabs.data[start : start + layout.used_bytes]
    if FORMATS[slabs.format].is_blocks:
        return golden.dequantize(data, slabs.format, layout.rows, layout.cols)
    return widen(data, slabs.format).reshape(layout.rows, layout.cols).astype(float)


def stored_weights() -> dict[str, np.ndarray]:
    """What the nested variant holds, in float64."""
    return {
        n: (x if n.endswith(("A_log", "linear_attn.norm.weight")) else from_bf16(to_bf16(x))).astype(float)
        for n, x in checkpoints.weights().items()
    }


def check_every_weight(container: Container, tolerance: dict[str, float]) -> None:
    """Each weight of the model is where the architecture page says, within the error of its format."""
    w, width = stored_weights(), checkpoints.WIDTH

    def close(found: np.ndarray, expected: np.ndarray, kind: str, what: str) -> None:
        assert found.shape == expected.shape, what
        error, size = (np.sqrt((m**2).sum(axis=-1)) for m in (found - expected, expected))
        assert (error <= tolerance[kind] * size).all(), what

    close(matrix_values(container, "lm_head"), w["lm_head.weight"], "trunk", "lm_head")
    for name in ("embed_tokens", "norm"):
        assert np.array_equal(container.float32(name), w[f"{name}.weight"]), name
    for layer in range(checkpoints.LAYERS):
        p = f"layers.{layer}."
        stacked = {"self_attn.qkv_proj": ("q", "k", "v"), "self_attn.o_proj": ("o",)}
        plain = ["input_layernorm", "post_attention_layernorm", "mlp.gate", "mlp.shared_expert_gate"]
        if layer == 3:
            plain += ["self_attn.q_norm", "self_attn.k_norm"]
            sources = {n: [f"self_attn.{part}_proj.weight" for part in parts] for n, parts in stacked.items()}
        else:
            plain += ["linear_attn.norm"]
            sources = {
                "linear_attn.in_proj_qkvz": ["linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight"],
                "linear_attn.out_proj": ["linear_attn.out_proj.weight"],
            }
            for name in ("A_log", "dt_bias"):
                assert np.array_equal(container.float32(f"{p}linear_attn.{name}"), w[f"{p}linear_attn.{name}"])
            ba = np.concatenate([w[f"{p}linear_attn.in_proj_{n}.weight"] for n in "ba"])
            assert np.array_equal(container.float32(f"{p}linear_attn.in_proj_ba"), ba)
            conv = w[f"{p}linear_attn.conv1d.weight"][:, 0]
            assert np.array_equal(container.float32(f"{p}linear_attn.conv1d"), conv)
        for name in plain:
            assert np.array_equal(container.float32(p + name), w[f"{p}{name}.weight"]), p + name
        for name, parts in sources.items():
            expected = np.concatenate([w[p + part] for part in parts])
            close(matrix_values(container, p + name), expected, "trunk", p + name)
        shared, experts = container.slabs(f"{p}mlp.shared_expert"), container.slabs(f"{p}mlp.experts")
        for part in ("gate", "up", "down"):
            close(slab_part(shared, 0, part), w[f"{p}mlp.shared_expert.{part}_proj.weight"], "trunk", p + part)
        for e in range(checkpoints.EXPERTS):
            gate_up = w[f"{p}mlp.experts.gate_up_proj"][e]
            close(slab_part(experts, e, "gate"), gate_up[:width], "experts", f"{p}{e}.gate")
            close(slab_part(experts, e, "up"), gate_up[width:], "experts", f"{p}{e}.up")
            close(slab_part(experts, e, "down"), w[f"{p}mlp.experts.down_proj"][e], "experts", f"{p}{e}.down")


INT8, INT4 = 0.015, 0.25  # of a row's norm; another row's weights would be off by more than its whole norm


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({}, {"trunk": INT8, "experts": INT4}),
        ({"expert_scales": "row"}, {"trunk": INT8, "experts": INT4}),
        ({"trunk_bits": 8, "expert_bits": 8}, {"trunk": INT8, "experts": INT8}),
        ({"trunk_bits": 4, "expert_bits": 4}, {"trunk": INT4, "experts": INT4}),
        ({"trunk_bits": 16, "expert_bits": 16}, {"trunk": 0, "experts": 0}),
    ],
)
def test_every_weight_arrives_in_its_place(tmp_path, options, tolerance):
    """Fused matrices, slabs, plain tensors: each weight is found again, exactly at 16 bits."""
    with converted(tmp_path, "nested", **options) as container:
        check_every_weight(container, tolerance)
        verify(container)


@pytest.mark.parametrize("variant", ["flat", "per_expert", "mixed_experts", "single_file", "with_mtp_visual"])
def test_naming_and_expert_layout_do_not_matter(tmp_path, variant):
    """C13, C14: the same weights give the same bytes in every tensor, whatever their names and files were."""
    with converted(tmp_path, "nested") as expected, converted(tmp_path, variant) as found:
        assert tensor_bytes(found) == tensor_bytes(expected)


def test_skipped_tensors_are_counted_in_the_manifest(tmp_path):
    """C14: what was left out is said, with its bytes."""
    with converted(tmp_path, "with_mtp_visual") as container:
        assert (
            container.manifest.skipped["mtp"]["tensors"] == 3 and container.manifest.skipped["visual"]["tensors"] == 1
        )


def test_tied_head_is_quantised_apart_and_absent_at_16_bits(tmp_path):
    """C18: without lm_head.weight the embedding is the head; the exact path keeps one copy of it."""
    embedding = stored_weights()["embed_tokens.weight"]
    with converted(tmp_path, "tied") as container:
        assert container.manifest.tied and container.matrix("lm_head").format == "i8_row"
        error = np.abs(matrix_values(container, "lm_head") - embedding)
        assert (error <= np.abs(embedding).max(axis=1, keepdims=True) / 253).all()
    with converted(tmp_path, "tied", trunk_bits=16, expert_bits=16) as container:
        assert "lm_head" not in container.tensors and np.array_equal(matrix_values(container, "lm_head"), embedding)


def test_untied_head_is_used(tmp_path):
    """C18: an untied head's own rows arrive, here those of the nested one rolled by one."""
    with converted(tmp_path, "nested") as nested, converted(tmp_path, "untied_rolled") as rolled:
        assert np.array_equal(np.roll(matrix_values(nested, "lm_head"), 1, axis=0), matrix_values(rolled, "lm_head"))


@pytest.mark.parametrize("options", [{}, {"trunk_bits": 16, "expert_bits": 16}])
def test_tied_checkpoint_may_store_its_embedding_twice_but_no_other_head(tmp_path, options):
    """A head that would be ignored is an error, a copy is none."""
    with converted(tmp_path, "tied", **options) as expected, converted(tmp_path, "tied_with_head", **options) as found:
        assert tensor_bytes(found) == tensor_bytes(expected)
    with pytest.raises(
        ModelError, match="lm_head.weight is not the embedding, though config.json says tie_word_embeddings"
    ):
        converted(tmp_path, "tied_other_head", **options)


@pytest.mark.parametrize("variant", ["float16", "float32"])
def test_other_stored_types_are_kept_at_16_bits_and_quantised_otherwise(tmp_path, variant):
    """F16 and F32 checkpoints: exact in a 16-bit container, whose formats are the stored types."""
    kind = {"float16": "f16", "float32": "f32"}[variant]
    with converted(tmp_path, variant, trunk_bits=16, expert_bits=16) as container:
        assert container.manifest.trunk_format == container.manifest.expert_format == container.embed.format == kind
        x = checkpoints.weights()["lm_head.weight"]
        expected = x.astype(np.float16).astype(float) if kind == "f16" else x.astype(float)
        assert np.array_equal(matrix_values(container, "lm_head"), expected)
    with converted(tmp_path, variant) as container:
        verify(container)


def test_fused_parts_of_two_types_become_float32_at_16_bits(tmp_path):
    """in_proj_qkv in bf16 and in_proj_z in float32 make one float32 matrix; other matrices keep their type."""
    held = {
        f"model.{n}" if n != "lm_head.weight" else n: checkpoints.stored(n, x) for n, x in checkpoints.weights().items()
    }
    z, b = "model.layers.1.linear_attn.in_proj_z.weight", "model.layers.1.linear_attn.in_proj_b.weight"
    plain = {n: checkpoints.weights()[n.removeprefix("model.")] for n in (z, b)}
    held |= {n: checkpoints.stored(n, x, "F32") for n, x in plain.items()}
    checkpoints.write_folder(tmp_path / "hf", {"model.safetensors": held}, checkpoints.text_config())
    convert(tmp_path / "hf", tmp_path / "out", trunk_bits=16, expert_bits=16)
    with Container.open(tmp_path / "out") as container:
        formats = {n: m["format"] for n, m in container.manifest.matrices.items()}
        assert (
            formats["layers.1.linear_attn.in_proj_qkvz"] == "f32"
            and formats["layers.0.linear_attn.in_proj_qkvz"] == "bf16"
        )
        assert (container.manifest.trunk_format, container.manifest.expert_format) == ("f32", "bf16")
        assert container.slabs("layers.0.mlp.shared_expert").format == "f32"
        assert container.matrix("layers.1.linear_attn.in_proj_ba").format == "f32"
        assert np.array_equal(
            matrix_values(container, "layers.1.linear_attn.in_proj_qkvz")[128:], plain[z].astype(float)
        )


def test_float8_checkpoint_converts_to_value_times_scale(tmp_path):
    """C19: through the converter, within 6.6 % and a 1024th of a scale of the weights that were stored."""
    w = checkpoints.weights()["layers.3.self_attn.o_proj.weight"].astype(float)
    with converted(tmp_path, "fp8_block", trunk_bits=16, expert_bits=16) as container:
        found = matrix_values(container, "layers.3.self_attn.o_proj")
        assert container.matrix("layers.3.self_attn.o_proj").format == "f32"
        assert (np.abs(found - w) <= 0.066 * np.abs(w) + np.abs(w).max() / 448 / 1024).all() and (found != w).any()
    with converted(tmp_path, "fp8_block") as container:
        verify(container)


def test_zero_expert_is_exactly_zero(tmp_path):
    """C22: an expert of zeros and a row of zeros stay so in every format."""
    for options in ({}, {"expert_scales": "row"}, {"expert_bits": 8}):
        with converted(tmp_path, "zero_expert", **options) as container:
            slabs = container.slabs("layers.1.mlp.experts")
            assert not any(slab_part(slabs, 3, part).any() for part in ("gate", "up", "down"))
            assert slab_part(slabs, 2, "gate").any()
            assert not matrix_values(container, "layers.2.linear_attn.in_proj_qkvz")[128 + 9].any()


def test_outlier_row_is_on_top_of_the_report_and_of_the_manifest(tmp_path):
    """C23: the row that one weight erased is named first, by tensor, expert and row."""
    for options in ({}, {"expert_scales": "row"}, {"expert_bits": 8}):
        with converted(tmp_path, "outlier", **options) as container:
            worst = container.manifest.report["worst_rows"][0]
            assert (worst["tensor"], worst["row"]) == ("layers.2.mlp.experts.5.gate_proj", 7)
            assert sum(f["rows_above_bound"] for f in container.manifest.report["formats"].values()) == 1


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("nan_norm", "tensor model.language_model.norm.weight holds a value that is NaN or infinite, in row 0"),
        ("nan_expert", "layers.2.mlp.experts.down_proj holds a value that is NaN or infinite, in row 393"),
        ("inf_head", "tensor lm_head.weight holds a value that is NaN or infinite, in row 200"),
        ("truncated_shard", "model-00002-of-00002.safetensors: is cut off"),
        ("unknown_tensor", "mystery.weight is unknown"),
        ("fp8_noscale", "o_proj.weight_scale_inv is missing"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"trunk_bits": 16, "expert_bits": 16}])
def test_bad_checkpoint_is_one_line_and_nothing_is_written(tmp_path, variant, expected, options):
    """C14, C15, C19, C28: refused with file and tensor; neither a container nor a partial one stays."""
    checkpoints.write(tmp_path / "hf", variant)
    with pytest.raises(ModelError, match=expected) as caught:
        convert(tmp_path / "hf", tmp_path / "out", **options)
    assert "\n" not in str(caught.value) and [p.name for p in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"trunk_bits": 16}, "--trunk-bits 16 --expert-bits 4: 16 bits is the unquantised reference path"),
        ({"expert_bits": 16}, "--trunk-bits 8 --expert-bits 16: 16 bits"),
        ({"expert_bits": 8, "expert_scales": "row"}, "--expert-scales row: only for --expert-bits 4, not 8"),
        ({"trunk_bits": 5}, "--trunk-bits is 5; expected one of 4, 8, 16"),
        ({"expert_scales": "column"}, "--expert-scales is column; expected one of group, row"),
    ],
)
def test_options_that_do_not_go_together_are_refused(tmp_path, options, expected):
    """Nothing is accepted and then ignored; the destination is not touched."""
    with pytest.raises(RequestError, match=expected):
        convert(checkpoints.write(tmp_path / "hf"), tmp_path / "out", **options)
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_taken_destination_is_refused_before_anything_is_read(tmp_path):
    """An existing container is never overwritten, and a missing source is not even noticed."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "coli.json").write_text("{}")
    with pytest.raises(ModelError, match="out: exists and is not empty"):
        convert(tmp_path / "no-such-source", tmp_path / "out")


def test_small_files_are_kept_byte_for_byte(tmp_path):
    """config.json, generation_config.json and the tokenizer's files, those that exist; nothing else is copied."""
    src = checkpoints.write(tmp_path / "hf-nested", "nested")
    (src / "README.md").write_text("not copied")
    with converted(tmp_path, "nested") as container:
        for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            assert (container.path / name).read_bytes() == (src / name).read_bytes()
        assert not (container.path / "README.md").exists() and not (container.path / "chat_template.jinja").exists()


def test_conversion_is_the_same_bytes_every_time_and_for_every_piece_size(tmp_path, monkeypatch):
    """No clock, no path, no thread count and no chunk border in a container."""
    src = checkpoints.write(tmp_path / "hf")
    convert(src, tmp_path / "a")
    monkeypatch.setattr("coli.convert.convert._PIECE_BYTES", 5000)
    monkeypatch.setattr("coli.convert.convert.usable_cpus", lambda: 1)
    convert(src, tmp_path / "b")
    for path in (tmp_path / "a").iterdir():
        if path.name != "coli.json":
            assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name
    a, b = (json.loads((tmp_path / name / "coli.json").read_text()) for name in "ab")
    assert {k: v for k, v in a.items() if k != "report"} == {k: v for k, v in b.items() if k != "report"}
    assert a["report"]["worst_rows"] == b["report"]["worst_rows"]


def test_each_source_byte_is_read_once(tmp_path):
    """The figure that a resumed run is measured by; a tied embedding is read for itself and for the head."""
    done = convert(checkpoints.write(tmp_path / "hf"), tmp_path / "out")
    assert done.source_bytes_read == done.source_bytes > 0 and done.resumed_share == 0
    tied = convert(checkpoints.write(tmp_path / "tied-hf", "tied"), tmp_path / "tied")
    assert tied.source_bytes_read == tied.source_bytes + checkpoints.VOCAB * checkpoints.HIDDEN * 2
