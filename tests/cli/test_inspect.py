"""``coli inspect``: tables that add up, for containers and for checkpoints; --verify finds damage."""

from __future__ import annotations

import json
import logging
import shutil

import checkpoints
import gguf
import pytest
from conftest import FIXTURES
from convert import gguf_writer

from coli.cli.main import main
from coli.container.header import read_header


def inspect(capsys, *args: object) -> dict:
    assert main(["inspect", *map(str, args), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(autouse=True)
def fresh_log(monkeypatch):
    """The tagged lines go to this test's standard error, not to the one that the first test of the process had."""
    monkeypatch.setattr(logging.getLogger("coli"), "handlers", [])
    monkeypatch.setattr(logging.getLogger("coli"), "propagate", True)


@pytest.mark.parametrize("bits", [(8, 4), (16, 16)])
def test_inspect_sums_are_the_files_bytes(make_container, capsys, bits):
    """Bytes by component, headers included, are what lies on disk; the token's bytes are the sum of their column."""
    folder = make_container("tiny-random", trunk_bits=bits[0], expert_bits=bits[1])
    found = inspect(capsys, folder)
    on_disk = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert sum(found["bytes_by_component"].values()) == found["file_bytes"] == on_disk
    assert sum(found["bytes_read_per_token"].values()) == found["bytes_read_per_token_total"]
    assert found["geometry"]["num_experts"] == 8 and found["skipped"]["mtp"]["tensors"] == 9
    assert found["expert"]["count"] == 64


def test_inspect_table_holds_the_same_numbers(make_container, capsys):
    """What a person reads: every component with both columns, and the sums."""
    folder = make_container("tiny-random")
    found = inspect(capsys, folder)
    assert main(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()}
    for name, n_bytes in found["bytes_by_component"].items():
        assert [int(n.replace(",", "")) for n in rows[name]] == [n_bytes, found["bytes_read_per_token"].get(name, 0)]
    assert rows["sum"] == [f"{found['file_bytes']:,}", f"{found['bytes_read_per_token_total']:,}"]
    assert "left out: 9 mtp tensors" in out and "trunk i8_row, experts i4_group" in out


def test_inspect_shows_a_checkpoint_without_converting_it(tmp_path, capsys, monkeypatch):
    """Geometry, types and what would be left out; no cache is touched."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    src = checkpoints.write(tmp_path / "hf", "with_mtp_visual")
    found = inspect(capsys, src)
    assert found["kind"] == "checkpoint" and found["geometry"]["hidden_size"] == 64
    assert set(found["tensors"]) == {"bf16", "f32"} and found["skipped"]["visual"]["tensors"] == 1
    assert main(["inspect", str(src)]) == 0 and "left out: 3 mtp tensors" in capsys.readouterr().out
    assert not (tmp_path / "cache").exists()
    assert main(["inspect", str(src), "--verify"]) == 2 and "convert it first" in capsys.readouterr().err


def test_inspect_verify_names_the_damaged_tensor(make_container, tmp_path, capsys):
    """Sound: the bytes that were checked. One bit changed: one line with file and tensor, status 2."""
    folder = shutil.copytree(make_container("tiny-random"), tmp_path / "container")
    assert inspect(capsys, folder, "--verify")["verified_bytes"] > 0
    path = folder / "model-00004.safetensors"
    place = read_header(path).tensors["layers.3.self_attn.o_proj"]
    data = bytearray(path.read_bytes())
    data[place.offset + 300] ^= 1
    path.write_bytes(data)
    assert main(["inspect", str(folder)]) == 0
    capsys.readouterr()
    assert main(["inspect", str(folder), "--verify"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert "model-00004.safetensors: tensor layers.3.self_attn.o_proj is damaged" in err


def test_inspect_says_when_the_two_chat_templates_differ(make_container, tmp_path, capsys):
    """chat_template.jinja wins over tokenizer_config.json, and a difference is not kept quiet."""
    folder = shutil.copytree(make_container("tiny-textonly"), tmp_path / "container")
    assert inspect(capsys, folder)["chat_template"] == {"used": "tokenizer_config.json", "differ": False}
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert inspect(capsys, folder)["chat_template"] == {"used": "chat_template.jinja", "differ": True}
    assert main(["inspect", str(folder)]) == 0 and "holds a different one" in capsys.readouterr().out


def test_inspect_shows_the_stop_ids_of_all_files(tmp_path, capsys):
    """C16: what inspect shows is what ends an answer: config.json says 256, tokenizer_config.json <|im_end|> (258)."""
    src = checkpoints.write(tmp_path / "hf", "eos_split")
    assert inspect(capsys, src)["stop_ids"] == [256, 258]
    assert main(["inspect", str(src)]) == 0 and "stop ids             256, 258\n" in capsys.readouterr().out
    (src / "tokenizer.json").unlink()
    assert inspect(capsys, src)["stop_ids"] == [256]


def test_inspect_shows_the_tensors_of_a_gguf_file_as_the_file_has_them(tmp_path, capsys):
    """llama.cpp's formats, stacked experts counted once, and bytes that add up to the file's own; nothing as f32."""
    path = gguf_writer.write(FIXTURES / "tiny-textonly", tmp_path / "m.gguf", "Q8_0")
    stored = gguf.GGUFReader(path).tensors
    expected: dict[str, dict[str, int]] = {}
    for tensor in stored:
        of_type = expected.setdefault(tensor.tensor_type.name, {"tensors": 0, "bytes": 0})
        of_type["tensors"] += 1
        of_type["bytes"] += int(tensor.n_bytes)
    assert set(expected) == {"F32", "Q8_0"}
    assert inspect(capsys, path)["tensors"] == expected
    assert main(["inspect", str(path)]) == 0
    row = expected["Q8_0"]
    assert f"Q8_0 {row['tensors']:>15} tensors {row['bytes']:>18,} bytes\n" in capsys.readouterr().out


def test_inspect_says_what_the_numbers_of_the_experts_are(make_container, capsys):
    """How many, and how wide: "64 of 512" was read as a share."""
    folder = make_container("tiny-random")
    geometry = inspect(capsys, folder)["geometry"]
    assert main(["inspect", str(folder)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("experts  "))
    assert line.split(None, 1)[1] == (
        f"8 a layer, each {geometry['moe_intermediate_size']} wide; {geometry['num_experts_per_tok']} a token, "
        f"and a shared one {geometry['shared_expert_intermediate_size']} wide"
    )
