"""Which test covers which acceptance case: ``python tests/cases/index.py`` writes the table of README.md.

A test covers a case when its name or its docstring has the case's number; a module's docstring speaks for all its
tests.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent.parent
PAGE = Path(__file__).parent / "README.md"

TITLES = {
    "C01": "A partial placement list must not switch fitting off",
    "C02": "A model that fits the fast card stays on it",
    "C03": "Budget from free memory at upload time, not total",
    "C04": "'Does not fit' says where, how much and what to change",
    "C05": "Context growth is part of the plan",
    "C06": "A failed allocation falls back, it does not abort",
    "C07": "Runtime order and management order are joined by UUID",
    "C08": "A cgroup quota decides the default thread count",
    "C09": "A CPU set counts physical cores",
    "C10": "Slow cores must not pace the team",
    "C11": "An idle server is idle",
    "C12": "Two sockets, and containers that may not set memory policy",
    "C13": "Tensor prefix and expert layout do not matter",
    "C14": "MTP and vision tensors are skipped by name, others are not",
    "C15": "A shard shorter than its header says",
    "C16": "Stop ids and template come from all their files",
    "C17": "RoPE theta is found where it is, never assumed",
    "C18": "An untied head is used",
    "C19": "FP8 blocks need their scales",
    "C20": "GGUF import equals HF import",
    "C21": "An interrupted conversion leaves nothing that loads",
    "C22": "Zero rows and extremes give finite numbers",
    "C23": "One outlier must not erase its row",
    "C24": "A warm answer equals a cold answer",
    "C25": "The same prompt twice",
    "C26": "Turn two after the template dropped the thinking",
    "C27": "Prefill in one go equals token by token",
    "C28": "NaN logits are an error, not '!!!!'",
    "C29": "Token ids equal the reference tokenizer's",
    "C30": "Control tokens typed by a user stay text",
    "C31": "System messages anywhere, several, and 'developer'",
    "C32": "Thinking whose opening tag was in the prompt",
    "C33": "preserve_thinking and enable_thinking reach the template",
    "C34": "Content as a list of parts; nothing to say",
    "C35": "Unknown and null fields",
    "C36": "max_completion_tokens and 'length'",
    "C37": "Usage in streams",
    "C38": "A prompt longer than the context",
    "C39": "Bodies that are not JSON",
    "C40": "CORS preflight with an API key set",
    "C41": "Characters split over tokens",
    "C42": "Stop strings over token borders",
    "C43": "XML tool calls become tool_calls",
    "C44": "Drifting call syntax is no server error",
    "C45": "The client leaves in mid-stream",
    "C46": "Edges of temperature, top_k, top_p, min_p",
    "C47": "Bench prefill is real prefill",
    "C48": "Comparable records for regressions",
    "C49": "A heat file of another model, damaged, or shared",
}
# What these show only a running server can show; their tests are in tests/server.
SERVER = {"C11", "C25", "C35", "C36", "C37", "C38", "C39", "C40", "C45"}

_NUMBER = re.compile(r"(?<![A-Za-z0-9])[Cc](\d\d)(?!\d)")


@cache
def covering() -> dict[str, list[str]]:
    """Case -> its tests, as ``path::name`` below ``tests``, or a whole module's path."""
    found: dict[str, list[str]] = {case: [] for case in TITLES}
    for path in sorted(TESTS.rglob("test_*.py")):
        name = path.relative_to(TESTS).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for case in _cases(ast.get_docstring(tree)):
            found[case].append(name)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for case in _cases(f"{node.name.replace('_', ' ')} {ast.get_docstring(node)}"):
                    if name not in found[case]:
                        found[case].append(f"{name}::{node.name}")
    return found


def _cases(text: str | None) -> list[str]:
    return sorted({f"C{number}" for number in _NUMBER.findall(text or "")} & set(TITLES))


def page() -> str:
    """The text of README.md."""
    lines = [
        "# Acceptance cases",
        "",
        "What people who run hybrid mixture-of-experts models on mixed machines trip over, and the tests that hold it.",
        "Made by `python tests/cases/index.py` from the numbers in the tests' names and docstrings; "
        "tests that span several",
        "rooms are in `test_cases.py`, all others where their subject is. Files of the cases are in `tests/data`.",
        "",
        "| case | what | tests |",
        "| --- | --- | --- |",
    ]
    for case, tests in covering().items():
        shown = "<br>".join(f"`{test}`" for test in tests)
        if not tests:
            shown = "needs a server: `tests/server`"
        lines.append(f"| {case} | {TITLES[case]} | {shown} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
