"""C21: a conversion that is killed, or that runs out of room, leaves nothing that loads, and goes on where it was."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import checkpoints
import pytest

from coli.container.reader import Container
from coli.container.verify import verify
from coli.convert.convert import convert
from coli.errors import ModelError

ROOT = Path(__file__).parent.parent.parent

# The command, with a nap after each piece, so that a kill can hit any of them; and with the journal's batches as a
# share of the work only, as they are for a model of any real size.
SLOW = """
import sys, time
from coli.container import writer
from coli.cli.main import main
nap_s, make = float(sys.argv.pop(1)), writer.TensorPlan.__post_init__
def slow(self):
    make(self)
    for piece in self.pieces:
        object.__setattr__(piece, "make", lambda made=piece.make: (time.sleep(nap_s), made())[1])
writer.TensorPlan.__post_init__ = slow
writer._BATCH_LEAST_BYTES = 1
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return checkpoints.write(tmp_path_factory.mktemp("source") / "hf")


def command(*args: object, nap_s: float = 0) -> list[str]:
    return [sys.executable, "-c", SLOW, str(nap_s), *map(str, args)]


def start(source: Path, dst: Path, *flags: object, nap_s: float) -> subprocess.Popen:
    return subprocess.Popen(command("convert", source, dst, *flags, nap_s=nap_s), cwd=ROOT, stderr=subprocess.DEVNULL)


def n_done(dst: Path) -> int:
    """How many pieces the journal says are done."""
    journal = dst.with_name(dst.name + ".partial") / "journal.jsonl"
    if not journal.exists():
        return 0
    lines = [line for line in journal.read_bytes().split(b"\n") if line.startswith(b'{"done"') and line.endswith(b"}")]
    return sum(len(json.loads(line)["done"]) for line in lines)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_kill_at_half_reads_less_than_55_percent_again(tmp_path, source):
    """Killed when half of the bytes are done, the second run reads the rest and little more; same container."""
    flags = ("--trunk-bits", 16, "--expert-bits", 16)  # so that bytes out are bytes in
    whole = convert(source, tmp_path / "whole", trunk_bits=16, expert_bits=16)
    with Container.open(tmp_path / "whole") as container:
        places = sorted((t.entry.file, t.place.offset, t.place.n_bytes) for t in container.tensors.values())
    sizes = [n_bytes for _, _, n_bytes in places]  # a tensor of this model is one piece
    half = next(n for n in range(len(sizes)) if sum(sizes[:n]) >= 0.5 * sum(sizes))

    process = start(source, tmp_path / "out", *flags, nap_s=0.03)
    while n_done(tmp_path / "out") < half and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and not (tmp_path / "out").exists()
    again = subprocess.run(
        command("convert", source, tmp_path / "out", *flags, "--json"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(again.stdout)
    assert 0 < found["source_bytes_read"] < 0.55 * whole.source_bytes
    assert "of the parts were done before" in again.stderr and f"read {found['source_bytes_read']:,} of" in again.stderr
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("moments", [6, pytest.param(50, marks=pytest.mark.full)])
def test_kill_at_any_moment_leaves_nothing_that_loads_and_is_wrong(tmp_path, source, moments):
    """Random moments from the first file to the rename: afterwards no container or a whole one; a run makes it whole.

    Every other resumed run is killed too.
    """
    convert(source, tmp_path / "whole")
    whole = contents(tmp_path / "whole")
    begun, ended = run_until(source, tmp_path / "timed", None)
    random_moments, states = random.Random(5), {"nothing": 0, "resumable": 0, "whole": 0}
    for i in range(moments):
        dst = tmp_path / f"out{i}"
        for _ in range(1 + i % 2):
            run_until(source, dst, random_moments.uniform(0, 1.05 * (ended - begun)))
            partial = dst.with_name(dst.name + ".partial")
            if dst.exists():
                states["whole"] += 1
                break
            states["resumable" if partial.exists() else "nothing"] += 1
            if partial.exists() and not (partial / "coli.json").exists():
                with pytest.raises(ModelError):
                    Container.open(partial)
            elif partial.exists():  # between the end mark and the rename: whole, by its checksums
                with Container.open(partial) as container:
                    verify(container)
        if not dst.exists():
            convert(source, dst)
        assert {n: b for n, b in contents(dst).items() if n != "journal.jsonl"} == whole
        assert not partial.exists()
    print(states)
    # where a kill falls is the machine's business; many of them cannot all have missed the work
    assert moments < 50 or states["resumable"] > 0


def run_until(source: Path, dst: Path, kill_s: float | None) -> tuple[float, float]:
    """Convert, and kill -9 so long after the first file appeared; the times of that file and of the process's end."""
    process, started = start(source, dst, nap_s=0.004), time.monotonic()
    while process.poll() is None and not dst.with_name(dst.name + ".partial").exists():
        time.sleep(0.001)
    begun = time.monotonic()
    try:
        process.wait(kill_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return begun - started, time.monotonic() - started


def test_changed_source_does_not_continue_the_old_one(tmp_path, source):
    """A file that was touched since is another source: refused with what to do, not mixed."""
    src = checkpoints.write(tmp_path / "hf")
    process = start(src, tmp_path / "out", nap_s=0.02)
    while n_done(tmp_path / "out") < 10 and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.wait()
    os.utime(src / "model-00001-of-00002.safetensors", (1, 1))
    with pytest.raises(ModelError, match="holds an unfinished conversion that differs in files"):
        convert(src, tmp_path / "out")
    with pytest.raises(ModelError, match="differs in files, layout, options"):
        convert(src, tmp_path / "out", expert_bits=8)


def test_file_size_limit_is_one_line_and_leaves_no_container(tmp_path, source):
    """A full disk (here: a limit on file sizes) ends with status 2, the reason, and nothing under the final name."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    found = subprocess.run(
        command("convert", source, tmp_path / "out"), cwd=ROOT, capture_output=True, text=True, preexec_fn=limit
    )
    assert found.returncode == 2 and found.stdout == ""
    errors = [line for line in found.stderr.splitlines() if not line.startswith("[load]")]
    assert len(errors) == 1 and "File too large" in errors[0] and "bytes are needed in all" in errors[0]
    assert list(tmp_path.iterdir()) == []
    convert(source, tmp_path / "out")
