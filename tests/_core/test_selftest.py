"""The golden self-test, and the test of it: a build that contracts products and sums must not pass.

When the contract changes on purpose: ``kernels.selftest_checksums("scalar")`` gives the new column of simd/selftest.h,
once the other tests of this folder and of the float entries agree that the scalar table is right.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from coli._core import kernels

SIMD = Path(__file__).parents[2] / "coli" / "_core" / "simd"

# Prints "name: ok" or "name: the entry that failed" for every table that this CPU runs.
PROGRAM = """
#include "dispatch.c"
#include <stdio.h>
int main(void)
{
    for (const char *const *name = coli_kernels_compiled(); *name; name++) {
        const coli_kernels *k = coli_kernels_for(*name);
        const char *failed = k ? coli_selftest(k) : NULL;
        if (k)
            printf("%s: %s\\n", *name, failed ? failed : "ok");
    }
    return 0;
}
"""


def build_and_run(folder: Path, *flags: str) -> dict[str, str]:
    """Compile the kernels with ``flags`` and return the verdict on each table."""
    source, program = folder / "selftest.c", folder / "selftest"
    source.write_text(PROGRAM)
    # -fexpensive-optimizations is where gcc contracts; -O1 otherwise, for the time it takes
    command = ["cc", "-O1", "-fexpensive-optimizations", "-w", f"-I{SIMD}", *flags, str(source), "-o", str(program)]
    subprocess.run([*command, "-lm"], check=True, timeout=240)
    lines = subprocess.run([str(program)], check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()
    return dict(line.split(": ") for line in lines)


@pytest.mark.parametrize("isa", kernels.available())
def test_selftest_this_build_keeps_the_contract(isa):
    """Every table of the installed build returns the recorded bits."""
    assert kernels.selftest(isa) is None


def test_selftest_every_checksum_differs():
    """No two steps share a checksum, as they would if outputs were not written or inputs were all zero."""
    sums = kernels.selftest_checksums("scalar")
    assert len(sums) > 25 and len(set(sums)) == len(sums)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler on this machine")
def test_selftest_contracting_build_is_refused(tmp_path):
    """With fused multiply-add allowed every table fails; the installed build, above, is the control."""
    fma = ["-mfma"] if platform.machine() == "x86_64" else []
    contracted = build_and_run(tmp_path, "-ffp-contract=fast", *fma)
    assert set(contracted) == set(kernels.available())
    assert "ok" not in contracted.values(), contracted


@pytest.mark.skipif(shutil.which("objdump") is None, reason="no disassembler on this machine")
def test_selftest_no_fused_instruction_is_in_the_build():
    """The disassembly of the installed module holds no fused multiply-add of any width."""
    command = ["objdump", "-d", "--no-show-raw-insn", kernels.__file__]
    listing = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    fused = re.compile(r"\b(vfn?m(add|sub|addsub|subadd)\d|fn?m(add|sub)\s|fml[as]\s)")
    assert [line for line in listing.splitlines() if fused.search(line)] == []


def test_fp_mode_of_a_fresh_thread_is_ok():
    """Round to nearest, subnormals kept: what a thread has unless a library changed it."""
    assert kernels.fp_mode_ok()
