"""Kernel tables whose machine is not at hand, compared with the scalar one by a C program: Arm under an emulator,
AMX with its tile instructions in plain C."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from coli._core import kernels

TABLES = Path(__file__).parent / "tables"
SIMD = Path(__file__).parents[2] / "coli" / "_core" / "simd"


def compare(folder: Path, compiler: str, *flags: str, run: tuple[str, ...] = ()) -> list[str]:
    """Build and run compare.c; returns the lines it prints."""
    program = folder / "compare"
    command = [compiler, "-O1", "-ffp-contract=off", "-w", f"-I{SIMD}", *flags, str(TABLES / "compare.c")]
    subprocess.run([*command, "-o", str(program), "-lm"], check=True, timeout=240)
    done = subprocess.run([*run, str(program)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return done.stdout.splitlines()


def emulator() -> tuple[str, ...] | None:
    """What runs an Arm program here: nothing on Arm, an emulator where there is one and a cross compiler."""
    if platform.machine() == "aarch64":
        return ()
    found = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    return (found,) if found and shutil.which("aarch64-linux-gnu-gcc") else None


@pytest.mark.full
@pytest.mark.skipif(emulator() is None, reason="no Arm machine, nor a cross compiler and qemu-user")
def test_neon_equals_scalar_and_the_recorded_bits(tmp_path):
    """Arm's kernels return the scalar bits, and Arm's scalar table the bits recorded on x86."""
    compiler = "cc" if platform.machine() == "aarch64" else "aarch64-linux-gnu-gcc"
    lines = compare(tmp_path, compiler, "-static", run=emulator())
    assert {"neon: self-test ok", "scalar: self-test ok", "equal"} <= set(lines), lines


@pytest.mark.full
@pytest.mark.skipif("avx512vnni" not in kernels.available(), reason="the rest of the AMX table needs AVX512-VNNI")
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler on this machine")
def test_amx_tiles_in_plain_c_equal_scalar(tmp_path):
    """The AMX products, tile by tile, return the scalar bits for every length of batch and list of tokens."""
    lines = compare(tmp_path, "cc", "-include", str(TABLES / "amx.h"))
    assert {"amx: self-test ok", "avx512vnni: self-test ok", "equal"} <= set(lines), lines
