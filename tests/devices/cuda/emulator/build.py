"""Kernels as a shared library of the CPU, kept in a temporary folder by their content.

The text goes through the preprocessor; then shared memory, PTX and the list of kernels are rewritten, which C++ has no
words for; g++ compiles the rest as it stands.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

from devices.cuda.emulator.ptx import closing, split, translate

HERE = Path(__file__).parent
# Contraction and reassociation off: the kernels say their rounding, and so does the contract.  Overflow wraps and
# aliasing is free, as on a card.  The two checks end a grid with a message where a card would trap or read elsewhere.
FLAGS = (
    "-std=c++17", "-O1", "-g1", "-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing", "-fwrapv",
    "-fsigned-char", "-fPIC", "-shared", "-fvisibility=hidden", "-U_FORTIFY_SOURCE", "-fcf-protection=none", "-w",
)  # fmt: skip
CHECKS = ("-fsanitize=alignment,bounds", "-fsanitize-undefined-trap-on-error")


_KEPT_S = 7 * 24 * 3600  # since it was asked for last


class BuildError(Exception):
    """The kernels do not compile for the CPU."""


@cache
def missing() -> str | None:
    """Why nothing can be emulated here; None where it can."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return f"kernels are emulated on Linux on x86-64, not on {sys.platform} on {platform.machine()}"
    if shutil.which("g++") is None:
        return "no g++ to compile kernels for the CPU"
    return None


def kernel_library(text: str, arch: str = "sm_90") -> Path:
    """The library of the kernels in a text that NVRTC would compile for ``arch``.

    Raises BuildError with the compiler's first complaint, UnknownInstruction where PTX has no counterpart.
    """
    return _kept("kernels", text + arch, lambda folder: _compile_kernels(text, arch, folder))


def streams_library() -> Path:
    """The library of streams, events and graphs."""
    return _kept("streams", "", lambda folder: _compile(HERE / "streams.cpp", folder / "library.so", ("-pthread",)))


def _kept(kind: str, key: str, build: Callable[[Path], None]) -> Path:
    """The library that ``build(folder)`` makes, made once per key and version of this folder."""
    digest = hashlib.sha256(key.encode())
    for path in sorted(HERE.glob("*")):
        if path.suffix in (".h", ".cpp") or path.name in ("build.py", "ptx.py"):
            digest.update(path.read_bytes())
    root = Path(tempfile.gettempdir()) / f"coli-emulator-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    if root.stat().st_uid != os.getuid():
        raise BuildError(f"{root} belongs to somebody else: nothing is loaded from there; set TMPDIR")
    folder = root / f"{kind}-{digest.hexdigest()[:24]}"
    folder.mkdir(exist_ok=True)
    os.utime(folder)
    library = folder / "library.so"
    if not library.exists():
        with open(folder / "lock", "w") as lock:  # several test processes may ask at once
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                build(folder)
        for old in root.iterdir():
            if time.time() - old.stat().st_mtime > _KEPT_S:
                shutil.rmtree(old, ignore_errors=True)
    return library


def _compile_kernels(text: str, arch: str, folder: Path) -> None:
    source = folder / "kernels.cpp"
    source.write_text(rewrite(text, arch))
    _compile(source, folder / "library.so", CHECKS)


def _compile(source: Path, library: Path, more: tuple[str, ...] = ()) -> None:
    made = library.with_suffix(".new")
    _run("g++", *FLAGS, *more, "-I", str(HERE), str(source), "-o", str(made))
    made.rename(library)


def _run(*command: str, given: str | None = None) -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error:" in line] or done.stderr.splitlines() or ["?"]
        raise BuildError("\n".join(lines[:5]))
    return done.stdout


# ---- the text ---------------------------------------------------------------------------------------------------


def rewrite(text: str, arch: str) -> str:
    """The kernels as C++ upon cuda.h and ptx.h."""
    version = int(arch.removeprefix("sm_")) * 10
    text = _run("g++", "-E", "-x", "c++", "-std=c++17", "-undef", f"-D__CUDA_ARCH__={version}", "-", given=text)
    text = _shared(translate(text))
    table = "\n".join(f"EMULATOR_KERNEL({name}, {threads})" for name, threads in kernels(text))
    return (
        '#include "ptx.h"\n' + text + '\n# 1 "the table of kernels"\n'
        "static const Kernel table[] = {\n" + table + "\n};\n"
        'extern "C" __attribute__((visibility("default"))) const Kernel *emulator_kernels(int *n)\n'
        "{ *n = sizeof table / sizeof *table; return table; }\n"
    )


def kernels(text: str) -> list[tuple[str, int]]:
    """(name, most threads) of the kernels in a preprocessed text."""
    found = []
    for match in re.finditer(r'extern\s+"C"\s+__global__', text):
        head = text[match.end() : text.index("{", match.end())]
        bounds = re.search(r"__launch_bounds__\s*\(", head)
        most = 1024
        if bounds:
            end = closing(head, bounds.end() - 1)
            most = int(eval(split(head[bounds.end() : end], ",")[0].replace("/", "//"), {}))  # a constant expression
            head = head[: bounds.start()] + head[end + 1 :]
        found.append((re.search(r"\bvoid\s+(\w+)\s*\(", head)[1], most))
    return found


def _shared(text: str) -> str:
    """``__shared__`` declarations as references into the block's own memory."""
    out, at = [], 0
    for match in re.finditer(r"\b__shared__\b", text):
        start = max(text.rfind(c, 0, match.start()) for c in ";{}\n") + 1
        end = text.index(";", match.end())
        statement = text[start:end]
        out += [text[at:start], _declaration(statement), "\n" * statement.count("\n")]
        at = end + 1
    return "".join([*out, text[at:]])


def _declaration(statement: str) -> str:
    alignment = re.search(r"(?:__align__|alignas)\s*\(\s*(\d+)\s*\)", statement)
    is_dynamic = re.search(r"\bextern\b", statement) is not None
    statement = re.sub(r"\b(?:extern|static|__shared__)\b|(?:__align__|alignas)\s*\([^)]*\)", " ", statement)
    statement = " ".join(statement.split())
    depth, end = 0, len(statement)
    for at, c in enumerate(statement):  # the type, which may be a template, and the first name
        depth += (c == "<") - (c == ">")
        if depth == 0 and c in "[,":
            end = at
            break
    first = re.search(r"\w+\s*$", statement[:end])
    type_ = statement[: first.start()].strip()
    if is_dynamic:
        return f"auto *{first[0].strip()} = emulator::dynamic_shared<{type_}>();"
    declared = []
    for declarator in split(statement[first.start() :], ","):
        name, dimensions = re.fullmatch(r"\s*(\w+)\s*(.*)", declarator).groups()
        declared.append(
            f"static char {name}_site; auto &{name} = emulator::shared<{type_}{dimensions}>"
            f"(&{name}_site, {alignment[1] if alignment else 1});"
        )
    return " ".join(declared)


def lines(message: str) -> str:
    """A message with the places of faults in a library as lines of the kernels, where binutils are installed."""

    def line(match: re.Match) -> str:
        if shutil.which("addr2line") is None:
            return match[0]
        return Path(_run("addr2line", "-e", match[1], match[2]).strip()).name

    return re.sub(r"(/\S+\.so)\+(0x[0-9a-f]+)", line, message)


def load(library: Path) -> ctypes.CDLL:
    """A library, loaded.  It stays so: its signal handlers do."""
    return ctypes.CDLL(str(library))
