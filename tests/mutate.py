"""Break the engine on purpose and demand that the tests notice.

    python tests/mutate.py [NAME ...]        all mutations when none is named; --list prints them

Each mutation copies the repository to a temporary folder, makes one edit of the source there (a pattern that must
match exactly once, so that a mutation cannot rot into nothing), builds in place and runs the tests that should see it.
A mutation that the tests let through is a fault of the tests: exit status 1.  The unmutated copy is built and tested
first, so that a red run means the edit and nothing else.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = "breaks the numerics contract"  # what the self-test at import says when it refuses to run


@dataclass(frozen=True)
class Mutation:
    """One edit: ``pattern`` in ``file`` becomes ``replacement``, and ``tests`` must go red."""

    name: str
    why: str
    file: str
    pattern: str
    replacement: str
    tests: tuple[str, ...]


LAYERS = ("tests/engine/test_layers_vs_reference.py",)
KERNELS = ("tests/_core", *LAYERS)  # the first that notices is named, and should be a test of the kernel itself

MUTATIONS = (
    Mutation(
        "fma",
        "a build that may fuse multiply and add",
        "setup.py",
        r'"-ffp-contract=off"',
        '"-ffp-contract=fast", "-mfma"',
        KERNELS,
    ),
    Mutation(
        "rank_order",
        "experts added from the last rank to the first",
        "coli/_core/src/step.c",
        r"k->axpy_set\(w\[0\],(.*?)slot\[0\](.*?)for \(int j = 1; j < g->top_k; j\+\+\)",
        r"k->axpy_set(w[g->top_k - 1],\1slot[g->top_k - 1]\2for (int j = g->top_k - 2; j >= 0; j--)",
        LAYERS,
    ),
    Mutation(
        "attention_chunk",
        "attention summed in chunks of 32 positions",
        "coli/_core/src/step.h",
        r"#define COLI_KV_BLOCK 64\b",
        "#define COLI_KV_BLOCK 32",
        LAYERS,
    ),
    Mutation(
        "rounding",
        "a quantiser that rounds halves away from zero",
        "coli/_core/simd/int_scalar.h",
        r"float r = \(x\[i\] \* inverse \+ 12582912\.0f\) - 12582912\.0f;",
        "float r = roundf(x[i] * inverse);",
        KERNELS,
    ),
    Mutation(
        "scale_product",
        "a group's dot times one scale, then times the other",
        "coli/_core/simd/int_scalar.h",
        r"scale = scale \* half_to_float\(h\);\s*\}\s*total\[r\] = total\[r\] \+ \(float\)dot\[r\] \* scale;",
        "total[r] = total[r] + ((float)dot[r] * scale) * half_to_float(h);\n"
        "                } else\n"
        "                    total[r] = total[r] + (float)dot[r] * scale;",
        KERNELS,
    ),
)


def copy_repository(target: Path) -> None:
    """Sources, tests and built modules, with their times: only what an edit touches is built again."""
    skip = shutil.ignore_patterns(".git", ".venv", "build", "dist", "__pycache__", ".hypothesis", "*.egg-info")
    shutil.copytree(ROOT, target, ignore=skip, symlinks=True)


def mutate(folder: Path, mutation: Mutation) -> None:
    """Make the edit; a pattern that does not match exactly once is an error."""
    path = folder / mutation.file
    text, count = re.subn(mutation.pattern, mutation.replacement, path.read_text(), flags=re.DOTALL)
    if count != 1:
        sys.exit(f"mutate: {mutation.name}: the pattern matches {count} times in {mutation.file}, expected once: "
                 f"{mutation.pattern}")  # fmt: skip
    path.write_text(text)


def build(folder: Path, force: bool = False) -> None:
    """Build in place and make sure that Python in that folder finds the copy and no installed coli."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", *(["--force"] if force else [])]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"mutate: the copy in {folder} does not build:\n{run.stdout[-2000:]}{run.stderr[-4000:]}")
    probe = [sys.executable, "-c", "import coli; print(coli.__file__)"]
    found = subprocess.run(probe, cwd=folder, env=environment(folder), capture_output=True, text=True, check=True)
    if not Path(found.stdout.strip()).is_relative_to(folder):
        sys.exit(f"mutate: Python imports {found.stdout.strip()} instead of the copy in {folder}")


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}


def run_tests(folder: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """pytest's exit status and output, stopping at the first failure."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:benchmark", *tests]
    run = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True)
    return run.returncode, run.stdout + run.stderr


def is_red(status: int, output: str) -> bool:
    """A failing test, or the self-test at import that refuses to run; any other status is trouble of another kind."""
    return status == 1 or (status != 0 and GOLDEN in output)


def check(mutation: Mutation, folder: Path) -> bool:
    """Mutate, build, test; True when the tests notice."""
    started = time.monotonic()
    mutate(folder, mutation)
    build(folder, force=mutation.file == "setup.py")  # no object depends on the flags' own file
    status, output = run_tests(folder, mutation.tests)
    if status != 0 and not is_red(status, output):
        sys.exit(f"mutate: {mutation.name}: pytest ended with {status}, not with a failing test:\n{output[-3000:]}")
    line = next((ln for ln in output.splitlines() if ln.startswith(("FAILED", "ERROR"))), "")
    verdict = f"seen by {line.split(' - ')[0].partition(' ')[2] or 'the self-test'}" if status else "NOT SEEN"
    print(f"{mutation.name:16} {verdict}  ({mutation.why}; {time.monotonic() - started:.0f} s)", flush=True)
    return status != 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutations to try (default: all)")
    parser.add_argument("--list", action="store_true", help="print the mutations and what each breaks")
    args = parser.parse_args()
    known = {m.name: m for m in MUTATIONS}
    if args.list:
        print(*(f"{m.name:16} {m.why}" for m in MUTATIONS), sep="\n")
        return 0
    unknown = [name for name in args.names if name not in known]
    if unknown:
        parser.error(f"no mutation {unknown[0]}; there are {', '.join(known)}")
    chosen = [known[name] for name in args.names or known]
    with tempfile.TemporaryDirectory(prefix="coli-mutate-") as temp:
        clean = Path(temp, "clean")
        copy_repository(clean)
        build(clean)
        tests = tuple(dict.fromkeys(t for m in chosen for t in m.tests))
        status, output = run_tests(clean, tests)
        if status:
            sys.exit(f"mutate: the tests are red before any mutation:\n{output[-3000:]}")
        seen = []
        for mutation in chosen:
            folder = Path(temp, mutation.name)
            shutil.copytree(clean, folder)
            seen.append(check(mutation, folder))
            shutil.rmtree(folder)
    return 0 if all(seen) else 1


if __name__ == "__main__":
    sys.exit(main())
