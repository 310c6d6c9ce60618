"""C20: a GGUF file of a checkpoint gives the checkpoint's container: the same weights, tokens, template and answers."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import checkpoints
import gguf
import numpy as np
import pytest
from conftest import FIXTURES, assert_same_bits
from convert import gguf_writer
from convert.test_resume import contents, n_done, start

import coli
from coli.container.layout import FORMATS
from coli.container.reader import Container
from coli.container.schema import PLAIN
from coli.convert.checkpoint import Checkpoint, SourceTensor
from coli.convert.convert import convert
from coli.convert.gguf import GgufCheckpoint, GgufTensor
from coli.convert.gguf_file import read_gguf
from coli.convert.gguf_names import Origin
from coli.convert.plan import plan_sources
from coli.convert.resolve import find_model, resolve_model
from coli.errors import ModelError
from coli.text.template import template_sources
from coli.text.tokenizer import Tokenizer

TEXTONLY = FIXTURES / "tiny-textonly"  # tied, A_log in bf16, a tokenizer
TEMPLATE = (FIXTURES / "chat_template.jinja").read_text()
VARIANTS = [("qwen35moe", False), ("qwen35moe", True), ("qwen3next", False), ("qwen3next", True)]


def tensor_bytes(container: Container, name: str) -> bytes:
    found = container.tensors[name]
    start = found.place.offset
    return (container.path / found.entry.file).read_bytes()[start : start + found.place.n_bytes]


def whole(checkpoint: Checkpoint, tensor: SourceTensor) -> np.ndarray:
    """All rows of a tensor as float32."""
    out = np.empty((tensor.n_bytes // tensor.row_bytes, tensor.cols), np.float32)
    checkpoint.read_rows(tensor, 0, out)
    return out.reshape(tensor.shape)


def opened(src: Path, dst: Path, bits: int = 8) -> Container:
    convert(src, dst, trunk_bits=bits, expert_bits=16 if bits == 16 else 4)
    return Container.open(dst)


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> Path:
    """A checkpoint with its own head, twice as many value heads as key heads, and no merges (so no vocabulary here)."""
    folder = checkpoints.write(tmp_path_factory.mktemp("hf") / "model")
    (folder / "tokenizer.json").unlink()
    return folder


@pytest.fixture(scope="module")
def textonly_gguf(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("gguf") / "textonly.gguf"
    return gguf_writer.write(TEXTONLY, out, "BF16", template=TEMPLATE)


# ---------------------------------------------------------------- equal to the Hugging Face folder


@pytest.mark.parametrize(("architecture", "old", "kind"), [*((*v, "F32") for v in VARIANTS), (*VARIANTS[0], "BF16")])
def test_c20_container_of_a_float_gguf_has_the_checkpoint_s_weights(hf, tmp_path, architecture, old, kind):
    """C20: quantised matrices are the same bytes, small tensors the same values, whatever the file's spelling."""
    ours = opened(gguf_writer.write(hf, tmp_path / "m.gguf", kind, architecture=architecture, old=old), tmp_path / "g")
    theirs = opened(hf, tmp_path / "h")
    assert list(ours.tensors) == list(theirs.tensors)
    for name, tensor in theirs.tensors.items():
        if FORMATS[tensor.format].is_blocks:
            assert tensor_bytes(ours, name) == tensor_bytes(theirs, name), name
        elif name.endswith("A_log"):  # stored in float32 here: known to the rounding of its exponential
            assert np.abs(ours.float32(name) - theirs.float32(name)).max() <= 2.5e-7, name
        elif (
            "norm" in name and "linear_attn" not in name
        ):  # known to the rounding of 1 + w, which is what is computed with
            one = np.float32(1)
            assert_same_bits(one + ours.float32(name), one + theirs.float32(name), name)
        elif name != "embed_tokens":
            assert_same_bits(ours.float32(name), theirs.float32(name), name)
    with Checkpoint(hf) as source, GgufCheckpoint(tmp_path / "m.gguf") as file:
        assert_same_bits(*(whole(c, c.tensors["embed_tokens.weight"]) for c in (file, source)))
    assert ours.manifest.source["bytes"] == sum(e.n_bytes for e in read_gguf(tmp_path / "m.gguf").tensors.values())


def test_c20_sixteen_bit_container_of_a_bf16_gguf_holds_the_checkpoint_s_bytes(hf, tmp_path):
    """C20: at 16 bits nothing is computed on the way: matrices and experts are the stored bf16, byte for byte."""
    ours = opened(gguf_writer.write(hf, tmp_path / "m.gguf", "BF16"), tmp_path / "g", 16)
    theirs = opened(hf, tmp_path / "h", 16)
    big = [name for name, tensor in theirs.tensors.items() if tensor.entry.kind != PLAIN]
    assert len(big) == 4 * 4 + 1  # four in each layer, and the head
    for name in [*big, "embed_tokens"]:
        assert ours.tensors[name].format == "bf16" and tensor_bytes(ours, name) == tensor_bytes(theirs, name), name


@pytest.mark.parametrize(("architecture", "old", "bits"), [*((*v, 8) for v in VARIANTS), (*VARIANTS[0], 16)])
def test_c20_logits_of_64_positions_equal_the_checkpoint_s(tmp_path, architecture, old, bits):
    """C20: the same bits at all positions, for either architecture (and the same text follows)."""
    src = gguf_writer.write(TEXTONLY, tmp_path / "m.gguf", "F32", architecture=architecture, old=old)
    ids = np.random.default_rng(0).integers(0, 512, 64).tolist()
    logits = []
    for name, source in (("g", src), ("h", TEXTONLY)):
        opened(source, tmp_path / name, bits).close()
        with coli.load(tmp_path / name, devices="none", threads=1) as model:
            logits.append(np.asarray(model.logits(ids)))
    assert logits[0].shape == (64, 512)
    assert_same_bits(*logits)


def test_c20_small_files_say_what_the_checkpoint_s_say(textonly_gguf, tmp_path):
    """C20: configuration, stop ids, template; and the tokenizer encodes every case as the checkpoint's does."""
    with GgufCheckpoint(textonly_gguf) as ours, Checkpoint(TEXTONLY) as theirs:
        assert ours.config == theirs.config
        for name, data in ours.extra_files().items():
            (tmp_path / name).write_bytes(data)
    assert template_sources(tmp_path).text == TEMPLATE
    found, expected = Tokenizer.open(tmp_path), Tokenizer.open(TEXTONLY)
    assert (found.added, found.special_ids, found.size) == (expected.added, expected.special_ids, expected.size)
    for case in json.loads((FIXTURES / "tokenizer" / "tokenizer_cases.json").read_text()):
        for special in (True, False):
            assert found.encode(case["text"], special=special) == expected.encode(case["text"], special=special)
        assert found.decode(case["ids"]) == case["decoded"]
    named = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert named == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


# ---------------------------------------------------------------- quantised files


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1", "F16", "MXFP4"])
def test_quantised_tensors_are_the_package_s_values(hf, tmp_path, kind):
    """What is quantised a second time is what the gguf package makes of the file, with the heads in their own order."""
    path = gguf_writer.write(hf, tmp_path / "m.gguf", kind)
    with GgufCheckpoint(path) as file:
        stored = {
            name: gguf.dequantize(
                gguf.quantize(np.ascontiguousarray(x, np.float32), type_of(file, name)), type_of(file, name)
            )
            for name, x in gguf_writer.transformed(gguf_writer.weights(hf), file.config, "qwen35moe")
        }
        assert sum(type_of(file, name).name == kind for name in stored) > 40
        p, heads = "layers.0.linear_attn.", stored["blk.0.ssm_out.weight"].reshape(64, 2, 2, 16)
        expected = {
            "lm_head.weight": stored["output.weight"],
            "layers.3.self_attn.q_proj.weight": stored["blk.3.attn_q.weight"],
            "layers.3.mlp.experts.down_proj": stored["blk.3.ffn_down_exps.weight"],
            "layers.2.mlp.experts.5.up_proj.weight": stored["blk.2.ffn_up_exps.weight"][5],
            p + "in_proj_b.weight": stored["blk.0.ssm_beta.weight"][[0, 2, 1, 3]],
            p + "out_proj.weight": heads.swapaxes(1, 2).reshape(64, 64),
        }
        for name, values in expected.items():
            assert_same_bits(whole(file, file.tensors[name]), values, name)
    with opened(path, tmp_path / "out") as container:
        assert container.manifest.report["formats"]["i8_row"]["mean_error"] < 0.02


def type_of(file: GgufCheckpoint, name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType(read_gguf(file.path).tensors[name].type)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ2_XXS", "TQ1_0"])
def test_blocks_of_any_type_are_read_as_the_package_reads_them(textonly_gguf, tmp_path, kind):
    """Types that only llama.cpp's own tool writes: rows of them are the package's values."""
    quantised = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[quantised]
    raw = np.random.default_rng(1).integers(0, 256, (6, 512 // block * block_bytes), np.uint8) & 0x3B  # finite scales
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "qwen35moe")
    writer.add_tensor("x", raw, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    entry = read_gguf(tmp_path / "x.gguf").tensors["x"]
    assert entry.shape == (6, 512)
    origin = Origin("x", entry.shape, "x", entry.shape)
    tensor = GgufTensor("x", entry.path, "f32", entry.shape, entry.offset, entry.n_bytes, entry=entry, origin=origin)
    out = np.empty((2, 512), np.float32)
    with GgufCheckpoint(textonly_gguf) as file:
        file.read_rows(tensor, 3, out)
    assert_same_bits(out, gguf.dequantize(raw, quantised)[3:5])


# ---------------------------------------------------------------- split, rare and wrong files


def test_split_file_is_read_from_any_of_its_parts(hf, tmp_path):
    """Tensors over several files; the first part stands for all, and a part that is missing is named."""
    first = gguf_writer.write(hf, tmp_path / "m.gguf", most_tensors=20)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) == 4 and find_model(str(parts[2])) == first == parts[0]
    with GgufCheckpoint(parts[1]) as file:
        assert file.path == first and file.fingerprint()["files"].keys() == {part.name for part in parts}
    convert(first, tmp_path / "split")
    convert(gguf_writer.write(hf, tmp_path / "one.gguf"), tmp_path / "one")
    split, one = contents(tmp_path / "split"), contents(tmp_path / "one")
    assert {n: b for n, b in split.items() if n != "coli.json"} == {n: b for n, b in one.items() if n != "coli.json"}
    parts[2].unlink()
    with pytest.raises(ModelError, match=r"m-00003-of-00004.gguf: missing; it is part 3 of the 4"):
        convert(first, tmp_path / "again")


def test_layers_that_predict_ahead_are_left_out_and_counted(hf, tmp_path):
    """MTP blocks behind the model's own: as with a checkpoint, counted as skipped."""

    def add(writer, tensors) -> None:
        tensors["blk.4.attn_norm.weight"] = np.ones(64, np.float32)
        tensors["blk.4.nextn.eh_proj.weight"] = np.ones((64, 128), np.float32)

    done = convert(gguf_writer.write(hf, tmp_path / "m.gguf", blocks_ahead=1, change=add), tmp_path / "out")
    assert done.skipped["mtp"] == {"tensors": 2, "bytes": 4 * (64 + 64 * 128)}
    with Container.open(tmp_path / "out") as container:
        assert container.config.num_hidden_layers == 4


def without(name: str):
    return lambda writer, tensors: tensors.pop(name)


def having(name: str, x: np.ndarray):
    return lambda writer, tensors: tensors.update({name: x})


def saying(key: str, value: object, kind: gguf.GGUFValueType):
    def change(writer, tensors) -> None:
        writer.kv_data[0].pop(key, None)
        writer.add_key_value(key, value, kind)

    return change


U32, F32, TEXT, BOOL = (gguf.GGUFValueType[k] for k in ("UINT32", "FLOAT32", "STRING", "BOOL"))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (without("blk.1.ssm_dt.bias"), "tensor blk.1.ssm_dt.bias is missing"),
        (without("token_embd.weight"), "tensor token_embd.weight is missing"),
        (without("blk.3.attn_q.weight"), "tensor blk.3.attn_qkv.weight is missing"),
        (without("blk.2.ffn_up_exps.weight"), "tensor blk.2.ffn_up_exps.weight is missing"),
        (having("blk.0.mystery.weight", np.ones(4, np.float32)), "tensor blk.0.mystery.weight is unknown"),
        (having("blk.9.attn_norm.weight", np.ones(64, np.float32)), "tensor blk.9.attn_norm.weight is unknown"),
        (having("blk.0.ssm_conv1d.weight", np.ones((4, 128), np.float32)),
         r"blk.0.ssm_conv1d.weight has shape \[4, 128\]; its metadata makes it \[128, 4\]"),
        (having("blk.0.ssm_a", np.ones(4, np.float32)), "blk.0.ssm_a holds a value that is NaN or infinite"),
        (having("blk.0.attn_norm.weight", np.full(64, np.nan, np.float32)), "blk.0.attn_norm.weight holds a value"),
        (saying("general.architecture", "qwen35", TEXT), "is 'qwen35'; coli reads qwen35moe, qwen3next"),
        (saying("qwen35moe.rope.scaling.type", "yarn", TEXT), 'rope_type is "yarn"; coli computes only "default"'),
        (saying("qwen35moe.expert_gating_func", 2, U32), "expert_gating_func is 2; coli computes only 1, softmax"),
        (saying("qwen35moe.expert_weights_norm", False, BOOL), "norm_topk_prob is false"),
        (saying("qwen35moe.attention.value_length", 8, U32), "attention.value_length is 8"),
        (saying("qwen35moe.ssm.inner_size", 63, U32), "ssm.inner_size is 63; expected a multiple of the 4 value heads"),
        (saying("qwen35moe.attention.head_count", 4.0, F32), "attention.head_count is 4.0; expected an integer"),
        (saying("qwen35moe.rope.dimension_count", 33, U32), "rope.dimension_count is 33; expected 1 to 32"),
        (saying("qwen35moe.block_count", 0, U32), "block_count is 0"),
        (saying("qwen35moe.expert_used_count", 9, U32), "num_experts_per_tok is 9"),
        (saying("qwen35moe.rope.freq_base", float("nan"), F32), "rope.freq_base is nan; expected a number"),
        (lambda writer, tensors: writer.kv_data[0].pop("qwen35moe.rope.freq_base"),
         "qwen35moe.rope.freq_base is missing from its metadata"),
        (saying("general.sampling.top_k", 0.5, F32), "general.sampling.top_k is 0.5; expected an integer"),
        (saying("tokenizer.ggml.eos_token_id", 300, U32), r"eos_token_id is \[300\]; expected token ids from 0 to 271"),
    ],
)  # fmt: skip
def test_file_that_is_not_the_model_is_refused_in_one_line(hf, tmp_path, change, expected):
    """The tensor or the key, what was found and what was expected; nothing is written."""
    path = gguf_writer.write(hf, tmp_path / "m.gguf", change=change)
    with pytest.raises(ModelError, match=expected) as caught:
        convert(path, tmp_path / "out")
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_type_that_the_package_cannot_read_is_refused(hf, tmp_path, monkeypatch):
    """A type of which the package knows the size but not the arithmetic, as Q8_K is."""
    path = gguf_writer.write(hf, tmp_path / "m.gguf", "Q8_0")

    def dequantize(data, kind):
        raise NotImplementedError

    monkeypatch.setattr(gguf, "dequantize", dequantize)
    with pytest.raises(ModelError, match="token_embd.weight has type Q8_0, which the gguf package cannot widen"):
        GgufCheckpoint(path)


def test_missing_package_says_how_to_get_it(textonly_gguf, monkeypatch):
    """The extra is optional: one line with the command."""
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=r"needs the gguf package: pip install 'coli\[gguf\]'"):
        GgufCheckpoint(textonly_gguf)


def test_heads_per_layer_zero_for_deltanet_are_one_number(hf, tmp_path):
    """Some writers give head_count_kv by layer, 0 where there is no attention."""

    def by_layer(writer, tensors) -> None:
        del writer.kv_data[0]["qwen35moe.attention.head_count_kv"]
        writer.add_array("qwen35moe.attention.head_count_kv", [0, 0, 0, 2])

    with GgufCheckpoint(gguf_writer.write(hf, tmp_path / "m.gguf", change=by_layer)) as file:
        assert file.config.num_key_value_heads == 2
        plan_sources(file)


# ---------------------------------------------------------------- the command, the cache, a kill


def test_gguf_file_is_a_model_like_a_folder_and_is_converted_once(textonly_gguf, tmp_path, monkeypatch):
    """What `coli run` does with MODEL: the container comes from the cache the second time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = resolve_model(str(textonly_gguf))
    assert first.name.startswith("textonly.gguf-") and resolve_model(str(textonly_gguf)) == first
    with coli.load(textonly_gguf, devices="none", threads=1) as model, coli.load(first, devices="none") as same:
        texts = ["".join(m.generate("In the beginning", max_tokens=8)) for m in (model, same)]
    assert texts[0] == texts[1] != ""


def test_file_in_the_hub_s_cache_keeps_its_name(textonly_gguf, tmp_path, monkeypatch):
    """There a file is a link to a blob without a suffix."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "m.gguf").symlink_to((tmp_path / "blob").absolute())
    (tmp_path / "blob").write_bytes(textonly_gguf.read_bytes())
    assert resolve_model(str(tmp_path / "m.gguf")).name.startswith("m.gguf-")


def test_names_that_are_no_gguf_model_say_what_to_do(tmp_path):
    """A file that is not there is not looked for on the hub; a folder says which file in it to name."""
    with pytest.raises(ModelError, match=r"models/x.gguf: there is no such file"):
        find_model("models/x.gguf")
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelError, match=r"to use the GGUF file in it, name .*b.gguf"):
        find_model(str(tmp_path))


def test_vocabulary_that_spells_no_text_gives_a_model_of_ids(tmp_path):
    """The made-up tokens of a benchmark's file: no tokenizer.json, and the weights are converted all the same."""

    def made_up(writer, tensors) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list([f"t{i}" for i in range(512)])
        writer.add_token_types([gguf.TokenType.NORMAL] * 512)
        writer.add_token_merges(["t 0"])

    path = gguf_writer.write(TEXTONLY, tmp_path / "m.gguf", tokenizer=tmp_path / "none.json", change=made_up)
    convert(path, tmp_path / "out")
    assert "tokenizer.json" not in contents(tmp_path / "out")


def test_killed_conversion_of_a_gguf_goes_on_where_it_was(textonly_gguf, tmp_path):
    """C20, C21: kill -9 in the middle; the same command goes on, and the container is that of an undisturbed run."""
    convert(textonly_gguf, tmp_path / "whole")
    process = start(textonly_gguf, tmp_path / "out", nap_s=0.03)
    while n_done(tmp_path / "out") < 15 and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and not (tmp_path / "out").exists()
    done = convert(textonly_gguf, tmp_path / "out")
    assert done.resumed_share > 0 and done.source_bytes_read < done.source_bytes
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
