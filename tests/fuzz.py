"""Coverage-guided fuzzing of the readers of files that come from elsewhere.  Needs ``pip install atheris``; Linux.

    python tests/fuzz.py                                  # every reader, 60 s each
    python tests/fuzz.py header --runs 1000000            # one of them, so many files
    python tests/fuzz.py tokenizer --seconds 600 --corpus corpus/tokenizer

The rule is `readers.outcome`: success, or one ColiError of one printable line.  A traceback, a message that is not one
line, more than 10 s on one file, or more than 4 GiB of memory ends the run with status 1; the file that did it is left
in the folder that is named.  libFuzzer drives; two changes of five are its own, the others know JSON
(`readers.damage`).
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
CHILD = "--child"  # reader, scratch folder, libFuzzer's arguments


def main() -> int:
    if sys.argv[1:2] == [CHILD]:
        _child(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from readers import NAMES

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("reader", nargs="?", choices=NAMES, help="which reader (all of them)")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--runs", type=int, metavar="N", help="files to read")
    amount.add_argument("--seconds", type=int, metavar="S", default=60, help="time of each reader (60)")
    parser.add_argument("--corpus", type=Path, metavar="DIR", help="keep and reuse the interesting files here")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of libFuzzer (1)")
    args = parser.parse_args()
    if args.corpus and not args.reader:
        parser.error("--corpus is of one reader; name it")
    limit = f"-runs={args.runs}" if args.runs is not None else f"-max_total_time={args.seconds}"
    return max([_fuzz(name, limit, args.corpus, args.seed) for name in ([args.reader] if args.reader else NAMES)])


def _fuzz(name: str, limit: str, corpus: Path | None, seed: int) -> int:
    """One reader, in a process of its own: libFuzzer ends the process that it is called in."""
    scratch = Path(tempfile.mkdtemp(prefix=f"coli-fuzz-{name}-"))
    corpus = corpus or scratch / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    flags = [limit, f"-seed={seed}", "-timeout=10", "-rss_limit_mb=4096", f"-artifact_prefix={scratch}/", str(corpus)]
    started = time.monotonic()
    with open(scratch / "log", "wb") as log:
        command = [sys.executable, __file__, CHILD, name, scratch, *flags]
        status = subprocess.run(command, stdout=log, stderr=log).returncode
    elapsed_s = time.monotonic() - started
    taken, refused = np.fromfile(scratch / "counts", np.int64)
    verdict = "no fault" if status == 0 else f"FAULT (status {status}; see {scratch})"
    print(
        f"{name}: {taken + refused:,} files in {elapsed_s:.0f} s, {taken:,} taken, {refused:,} refused, "
        f"{len(list(corpus.iterdir())):,} kept for their coverage: {verdict}",
        flush=True,
    )
    if status:
        print((scratch / "log").read_text(errors="replace")[-3000:])
        return 1
    return 0


def _child(name: str, scratch: Path, flags: list[str]) -> None:
    import atheris

    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    with atheris.instrument_imports(include=["coli", "json"]):
        import readers
    files = Path(tempfile.mkdtemp(prefix="files-", dir="/dev/shm" if Path("/dev/shm").is_dir() else scratch))
    reader = readers.make(name, files)
    corpus = Path(flags[-1])
    for i, seed in enumerate(reader.seeds):
        (corpus / f"seed{i}").write_bytes(seed)
    counts = np.memmap(scratch / "counts", np.int64, "w+", shape=(2,))  # survives libFuzzer's exit

    def read(data: bytes) -> None:
        counts[0 if readers.outcome(reader, data) is None else 1] += 1

    def change(data: bytes, longest: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.4:
            return atheris.Mutate(data, longest)
        fresh = rng.random() < 0.4  # one fault in a good file gets furthest
        return readers.damage(rng.choice(reader.seeds) if fresh else bytes(data), rng)[:longest]

    largest = max(map(len, reader.seeds))
    atheris.Setup([sys.argv[0], f"-max_len={2 * largest + 4096}", *flags], read, custom_mutator=change)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
