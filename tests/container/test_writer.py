"""coli/container/writer.py: streaming, resuming, and never anything under the final name but a whole container."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from coli.config import ModelConfig
from coli.container import writer
from coli.container.layout import matrix_layout, slab_layout
from coli.container.manifest import Manifest
from coli.container.reader import Container, experts_field
from coli.container.schema import EXPERT_SLABS, MATRIX, PLAIN, entries
from coli.container.verify import verify
from coli.container.writer import Piece, TensorPlan, check_destination, write_container
from coli.errors import ModelError

CONFIG = {
    "model_type": "qwen3_5_moe_text", "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 8, "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 4,
    "linear_value_head_dim": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8, "rope_theta": 1e4,
}  # fmt: skip
MODEL = ModelConfig.from_dict(CONFIG)
EXTRA = {"config.json": json.dumps(CONFIG).encode()}
IDENTITY = {"source": "numbers"}


class Maker:
    """Pieces of numbered bytes that count how often they are made, and can fail at one of them."""

    def __init__(self, fail_at: int | None = None, error: Exception | None = None) -> None:
        self.made: list[int] = []
        self.n_pieces = 0
        self.fail_at, self.error = fail_at, error

    def piece(self, n_bytes: int) -> Piece:
        number = self.n_pieces
        self.n_pieces += 1

        def make() -> np.ndarray:
            if number == self.fail_at:
                raise self.error
            self.made.append(number)
            return np.full(n_bytes, number % 64, np.uint8)  # small bytes are finite in every type

        return Piece(n_bytes, make)

    def tensors(self) -> list[TensorPlan]:
        plans = []
        for entry in entries(MODEL):
            if entry.kind == PLAIN:
                dtype, shape, sizes = "BF16", entry.shape, [2 * int(np.prod(entry.shape))]
            elif entry.kind == MATRIX:
                sizes = [matrix_layout("f32", *entry.shape).total_bytes]
                dtype, shape = "U8", (sum(sizes),)
            else:
                stride = slab_layout("f32", entry.shape[-1], entry.shape[-2]).total_bytes
                sizes = [stride] * (entry.shape[0] if entry.kind == EXPERT_SLABS else 1)
                dtype, shape = "U8", (sum(sizes),)
            plans.append(TensorPlan(entry.name, entry.file, dtype, shape, tuple(self.piece(n) for n in sizes)))
        return plans


def manifest() -> Manifest:
    matrices = {
        e.name: {"format": "f32", "rows": e.shape[0], "cols": e.shape[1]} for e in entries(MODEL) if e.kind == MATRIX
    }
    experts = experts_field(slab_layout("f32", 16, 8), 4)
    return Manifest("0", "f32", "f32", "float32", False, {}, {}, matrices, experts, {}, {})


def write(dst: Path, maker: Maker, **options):
    return write_container(dst, maker.tensors(), EXTRA, manifest(), identity=IDENTITY, **options)


@pytest.fixture(autouse=True)
def journal_every_piece(monkeypatch):
    monkeypatch.setattr(writer, "_BATCH_MOST_BYTES", 1)


def test_container_from_any_maker_opens_and_verifies(tmp_path):
    """The writer knows no checkpoint: numbers will do, as they do for random weights."""
    maker = Maker()
    written = write(tmp_path / "out", maker)
    assert (written.n_pieces, written.resumed_pieces) == (maker.n_pieces, 0) and len(maker.made) == maker.n_pieces
    with Container.open(tmp_path / "out") as container:
        assert verify(container) > 0
        assert (
            sum(file["bytes"] for n, file in container.manifest.files.items() if n != "config.json") == written.n_bytes
        )
    assert not (tmp_path / "out.partial").exists() and not (tmp_path / "out" / "journal.jsonl").exists()


def test_files_hold_mapped_tensors_first_and_the_rest_by_falling_size(tmp_path):
    """U8 from a multiple of 4096, then wider types before narrower ones, so that no view is unaligned."""
    maker = Maker()
    plans = maker.tensors()
    last = plans.index(next(p for p in plans if p.name == "layers.0.linear_attn.A_log"))
    plans[last] = TensorPlan(plans[last].name, plans[last].file, "F32", (2,), (maker.piece(8),))
    write_container(tmp_path / "out", plans, EXTRA, manifest(), identity=IDENTITY)
    with Container.open(tmp_path / "out") as container:
        header = container.headers["model-00001.safetensors"]
        kinds = [t.dtype for t in sorted(header.tensors.values(), key=lambda t: t.offset)]
        assert header.data_offset % 4096 == 0 and kinds == sorted(kinds, key=["U8", "F32", "BF16"].index)


def test_interrupted_work_goes_on_where_it_was(tmp_path):
    """After a crash nothing that was done is made again, the note comes back, and the result is the same."""
    first = Maker(9, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", first, note=lambda: {"seen": 9})
    assert not (tmp_path / "out").exists() and (tmp_path / "out.partial").is_dir()
    with pytest.raises(ModelError, match="unfinished conversion"):
        Container.open(tmp_path / "out.partial")
    second, notes = Maker(), []
    written = write(tmp_path / "out", second, restore=notes.append)
    assert sorted(first.made + second.made) == list(range(second.n_pieces))
    assert written.resumed_pieces == len(first.made) > 0 and notes == [{"seen": 9}]
    write(tmp_path / "whole", Maker())
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes(), path.name


def test_journal_line_that_was_cut_is_forgotten(tmp_path):
    """A kill in the middle of a line costs that line and no more."""
    first, second = Maker(6, KeyboardInterrupt()), Maker()
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", first)
    journal = tmp_path / "out.partial" / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-5])
    write(tmp_path / "out", second)
    assert sorted(first.made[:-1] + second.made) == list(range(second.n_pieces))


def test_unfinished_work_of_another_identity_is_refused(tmp_path):
    """Other options or another source never continue what is there; the message says what differs and what to do."""
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", Maker(6, KeyboardInterrupt()))
    with pytest.raises(
        ModelError, match="out.partial: holds an unfinished conversion that differs in source; .*remove"
    ):
        write_container(tmp_path / "out", Maker().tensors(), EXTRA, manifest(), identity={"source": "others"})
    plans = Maker().tensors()[:-1]
    with pytest.raises(ModelError, match="differs in layout"):
        write_container(tmp_path / "out", plans, EXTRA, manifest(), identity=IDENTITY)


def test_bytes_that_changed_on_disk_are_found_before_the_end(tmp_path):
    """What is read back must be what was made, also by the interrupted run."""
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", Maker(12, KeyboardInterrupt()))
    with open(tmp_path / "out.partial" / "model-00000.safetensors", "r+b") as file:
        file.seek(4096)
        file.write(b"\x21")
    with pytest.raises(ModelError, match="model-00000.safetensors: reads back otherwise than it was written"):
        write(tmp_path / "out", Maker())
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial" / "coli.json").exists()


def test_source_at_fault_leaves_nothing(tmp_path):
    """A ModelError of the maker (a NaN, say) would come again: nothing is kept."""
    with pytest.raises(ModelError, match="bad weights"):
        write(tmp_path / "out", Maker(9, ModelError("bad weights")))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT])
def test_full_disk_while_writing_keeps_what_is_done(tmp_path, monkeypatch, code):
    """C21: one line with the reason and the bytes needed; the same call goes on from there."""
    real, calls = os.pwrite, []

    def pwrite(*args):
        calls.append(1)
        if len(calls) == 15:
            raise OSError(code, os.strerror(code))
        return real(*args)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(
        ModelError, match=rf"{os.strerror(code)}; [\d,]+ bytes are needed in all .*goes on from there"
    ) as caught:
        write(tmp_path / "out", Maker())
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
    second = Maker()
    write(tmp_path / "out", second)
    assert 0 < len(second.made) < second.n_pieces


def test_full_disk_at_the_start_gives_the_space_back(tmp_path, monkeypatch):
    """C21: where not even the empty files fit, no temporary folder stays."""

    def fallocate(fd, offset, length):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fallocate, raising=False)
    with pytest.raises(ModelError, match=r"No space left on device; .*\(nothing was kept\)"):
        write(tmp_path / "out", Maker())
    assert list(tmp_path.iterdir()) == []


def test_destination_that_is_taken_is_refused(tmp_path):
    """A file, a folder with something in it, a missing parent: refused; an empty folder is taken over."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "empty").mkdir()
    for name, expected in (("full", "is not empty"), ("full/x", "is not empty"), ("no/where", "no such folder")):
        with pytest.raises(ModelError, match=expected):
            check_destination(tmp_path / name)
    write(tmp_path / "empty", Maker())
    with Container.open(tmp_path / "empty"):
        pass


def test_folder_in_the_way_of_the_partial_one_is_not_written_into(tmp_path):
    """DST.partial may be somebody's folder: what is not ours is named and left alone."""
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.txt").write_text("x")
    with pytest.raises(ModelError, match="thesis.txt: in the way"):
        write(tmp_path / "out", Maker())
    assert (tmp_path / "out.partial" / "thesis.txt").read_text() == "x"


def test_second_run_at_the_same_time_is_kept_out(tmp_path):
    """Two conversions into one folder would spoil each other."""

    def nested() -> dict:
        with pytest.raises(ModelError, match="another coli convert is at work"):
            write(tmp_path / "out", Maker())
        return {}

    write(tmp_path / "out", Maker(), note=nested)


def test_finish_changes_the_manifest_last(tmp_path):
    """What is known only at the end, the report for one, is in the manifest that is written."""
    write(tmp_path / "out", Maker(), finish=lambda m: dataclasses.replace(m, report={"x": 1}))
    with Container.open(tmp_path / "out") as container:
        assert container.manifest.report == {"x": 1}
