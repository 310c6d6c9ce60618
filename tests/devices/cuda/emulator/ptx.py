"""``asm`` statements as calls of the functions in ptx.h.

An instruction is known by its name alone, so a kernel's function around it may be called what it likes.
"""

from __future__ import annotations

import re
from pathlib import Path

_KNOWN = frozenset(re.findall(r"\bPTX (\w+)\(", (Path(__file__).parent / "ptx.h").read_text()))
_MACROS = re.compile(r"^(ld|st)_(shared_)?((v[24]_)?[usbf]\d+)$|^mma_sync_aligned_m16n8k32_|^ldmatrix_")
_ORDERED = {"ld", "st", "atom", "red", "prefetch", "fence", "membar", "cp"}
_LEFT_OUT = re.compile(
    r"global|nc|const|weak|relaxed|acquire|release|acq_rel|volatile|mmio|cta|cluster|gpu|sys|gl|ca|cg|cs|cv|lu|wb|wt"
    r"|sc|proxy|alias|L1(::\w+)*|L2(::\w+)*|shared::cta|noinc"
)


class UnknownInstruction(Exception):
    """A kernel uses PTX that ptx.h has no function for."""


def translate(text: str) -> str:
    """The text with every ``asm`` replaced, on the same lines."""
    out, at = [], 0
    for match in re.finditer(r"\b(?:asm|__asm__|__asm)\b\s*(?:volatile|__volatile__)?\s*\(", text):
        end = closing(text, match.end() - 1)
        try:
            calls = _statement(text[match.end() : end])
        except UnknownInstruction as error:
            raise UnknownInstruction(f"{_place(text, match.start())}: {error}") from None
        out += [text[at : match.start()], "do { ", calls, " } while (0)", "\n" * text.count("\n", match.start(), end)]
        at = end + 1
    return "".join([*out, text[at:]])


def closing(text: str, opening: int) -> int:
    """Index of the bracket that closes the one at ``opening``; strings are skipped."""
    depth, at = 0, opening
    while True:
        c = text[at]
        if c in "\"'":
            at = re.compile(rf"{c}(?:[^{c}\\]|\\.)*{c}").match(text, at).end() - 1
        depth += (c in "([{") - (c in ")]}")
        if depth == 0:
            return at
        at += 1


def split(text: str, mark: str) -> list[str]:
    """Pieces between marks that stand outside brackets and strings."""
    pieces, start, at = [], 0, 0
    while at < len(text):
        c = text[at]
        if c in "\"'":
            at = re.compile(rf"{c}(?:[^{c}\\]|\\.)*{c}").match(text, at).end()
        elif c in "([{":
            at = closing(text, at) + 1
        elif text.startswith(mark, at):
            pieces.append(text[start:at])
            start = at = at + len(mark)
        else:
            at += 1
    return [*pieces, text[start:]]


def _place(text: str, at: int) -> str:
    """Where a place is, for messages: contract.cu: function half_to_float."""
    marks = re.findall(r'^# \d+ "([^"]*)"', text[:at], re.MULTILINE)
    names = re.findall(r"\b(\w+)\s*\([^;{}]*\)\s*\{", text[:at])
    names = [name for name in names if name not in ("if", "for", "while", "switch")]
    return f"{marks[-1] if marks else 'kernels'}: function {names[-1] if names else '?'}"


def _statement(inside: str) -> str:
    """C++ statements for what stands between the brackets of an asm."""
    template, *lists = split(inside, ":")
    code = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', template)).encode().decode("unicode_escape")
    operands = []
    for operand in [o for part in lists[:2] for o in split(part, ",") if o.strip()]:
        operands.append(operand[operand.index("(", operand.rindex('"')) :].strip())
    names = re.findall(r"\[(\w+)\]\s*\"", "".join(lists[:2]))
    for place, name in enumerate(names):
        code = code.replace(f"%[{name}]", f"%{place}")
    code = re.sub(r"/\*.*?\*/|//[^\n]*", "", code, flags=re.DOTALL)
    statements = [part.strip() for part in re.split(r"[;\n]", code)]
    return " ".join(_call(part, operands) for part in statements if part)


def _call(instruction: str, operands: list[str]) -> str:
    opcode, _, rest = instruction.partition(" ")
    name = _name(opcode)
    if name not in _KNOWN and not _MACROS.match(name):
        raise UnknownInstruction(
            f"the PTX instruction {instruction!r} is not known to the emulator; add `PTX {name}(...)` to ptx.h"
        )
    arguments = []
    for part in split(rest, ","):
        part = part.strip()
        if part.startswith("{"):
            arguments += part.strip("{}").split(",")
        elif part:
            arguments.append(part)
    return f"emulator::ptx::{name}({', '.join(_operand(a.strip(), operands) for a in arguments)});"


def _name(opcode: str) -> str:
    """ "ld.global.nc.L1::no_allocate.v4.u32" -> "ld_v4_u32"."""
    first, *rest = opcode.split(".")
    if first == "mov":
        return "mov"
    if first in ("fence", "membar"):
        return first
    if first == "cp":
        kept = [part for part in rest if part not in ("shared", "global") and not _LEFT_OUT.fullmatch(part)]
    elif first in _ORDERED:
        kept = [part for part in rest if not _LEFT_OUT.fullmatch(part)]
    elif first == "ldmatrix":
        kept = [part for part in rest if not part.startswith("shared")]
    else:
        kept = rest
    return "_".join([first, *kept]).replace("::", "_")


def _operand(text: str, operands: list[str]) -> str:
    if text.startswith("["):
        return f"emulator::ptx::Address({', '.join(_operand(t.strip(), operands) for t in text[1:-1].split('+'))})"
    special = re.fullmatch(r"%%?([a-z]\w*)", text)
    if special:
        return f"emulator::ptx::special_{special[1]}()"
    return re.sub(r"%(\d+)", lambda match: operands[int(match[1])], text)
