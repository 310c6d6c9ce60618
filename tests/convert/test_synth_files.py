"""coli/convert/synth_files.py: what is at its place is whole, whatever ended the writing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coli.config import ModelConfig
from coli.convert import synth_files
from coli.convert.checkpoint import Checkpoint
from coli.convert.plan import plan_sources
from coli.convert.synth_files import write_gguf, write_hf
from coli.convert.synthetic import Synthetic, geometry
from coli.errors import ModelError

SMALL = geometry("small8") | {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}  # fmt: skip


class Stop(BaseException):
    """Ends a writing as Ctrl-C does."""


def stopping(n: int):
    """A progress that ends the writing at the n-th piece."""
    left = [n]

    def progress(n_bytes: int) -> None:
        left[0] -= 1
        if not left[0]:
            raise Stop

    return progress


@pytest.fixture(params=["hf", "gguf"])
def write(request):
    if request.param == "gguf":
        pytest.importorskip("gguf")
    return {"hf": write_hf, "gguf": write_gguf}[request.param]


def test_interrupted_writing_leaves_nothing(write, tmp_path):
    """Neither the destination nor a part of it is there; the same call then writes all."""
    for n in (1, 5, 20):
        with pytest.raises(Stop):
            write(Synthetic(SMALL), tmp_path / "out", progress=stopping(n))
        assert list(tmp_path.iterdir()) == []
    assert write(Synthetic(SMALL), tmp_path / "out") > 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_destination_appears_only_when_all_of_it_is_on_the_disk(write, tmp_path, monkeypatch):
    """While pieces are made nothing has the destination's name; every file, and the rename's folder, is synced."""
    synced, seen = set(), []
    fsync = os.fsync

    def noting(fd):
        synced.add(os.fstat(fd).st_ino)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noting)
    out = tmp_path / "out"
    write(Synthetic(SMALL), out, progress=lambda n_bytes: seen.append(out.exists()))
    assert seen and not any(seen)
    files = [out, *out.rglob("*")] if out.is_dir() else [out]
    assert {path.stat().st_ino for path in [tmp_path, *files]} <= synced


def test_taken_destination_is_refused_and_kept(write, tmp_path):
    """A file, or a folder that is not empty, is nobody's to overwrite; nor is another run's part."""
    out = tmp_path / "out"
    out.write_text("mine")
    with pytest.raises(ModelError, match="out: exists"):
        write(Synthetic(SMALL), out)
    assert out.read_text() == "mine"
    out.unlink()
    (tmp_path / "out.partial").write_text("of another run")
    with pytest.raises(ModelError, match="out.partial: another coli synth"):
        write(Synthetic(SMALL), out)
    assert (tmp_path / "out.partial").read_text() == "of another run"
    with pytest.raises(ModelError, match="no such folder"):
        write(Synthetic(SMALL), tmp_path / "none" / "out")


def test_disk_error_is_one_line_that_names_the_destination(write, tmp_path, monkeypatch):
    """A full disk names no file by itself: write() knows none."""

    def full(path: Path) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(synth_files, "sync", full)
    with pytest.raises(ModelError, match="out: cannot be written: No space left on device"):
        write(Synthetic(SMALL), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_written_checkpoint_is_one_that_convert_takes(tmp_path):
    """Every tensor that the converter asks for is there, under the family's names."""
    write_hf(Synthetic(SMALL), tmp_path / "out")
    with Checkpoint(tmp_path / "out") as checkpoint:
        plan_sources(checkpoint)
        assert checkpoint.config == ModelConfig.from_dict(SMALL)
