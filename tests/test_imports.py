"""The arrows of ARCHITECTURE.md: who may import whom, and what ``import coli`` may load."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "coli"

# A room may import rooms of a lower number, and its neighbours of the same number as long as no circle forms.
LEVEL = {
    "errors": 0,
    "_core": 1,
    "files": 1,
    "log": 1,
    "settings": 1,
    "config": 2,
    "placement": 3,
    "threads": 3,
    "container": 3,
    "devices": 3,
    "text": 4,
    "convert": 4,
    "tier": 4,
    "engine": 4,
    "model": 5,
    "placing": 5,
    "probing": 5,
    "server": 6,
    "cli": 7,
}
# Rooms with a list of their own, stricter than their level.
ONLY = {"_core": set(), "errors": set(), "placement": {"errors"}}
# What placement may use of the standard library: values in, values out; no file, no process, no clock.
PURE = {
    "__future__", "abc", "bisect", "collections", "copy", "dataclasses", "difflib", "enum", "fractions", "functools",
    "heapq", "itertools", "json", "math", "operator", "re", "statistics", "string", "textwrap", "types", "typing",
}  # fmt: skip
HEAVY = (
    "numpy", "torch", "cuda", "pynvml", "tokenizers", "jinja2", "safetensors", "psutil", "tqdm", "starlette", "uvicorn",
    "msgspec", "huggingface_hub", "matplotlib",
)  # fmt: skip

CYTHON_IMPORT = re.compile(r"^\s*(?:from\s+(\S+)\s+c?import\s+(\S.*)|c?import\s+(\S.*))", re.MULTILINE)


def python_imports(path: Path) -> set[str]:
    """Absolute dotted names that a .py file imports anywhere, inside functions and TYPE_CHECKING too."""
    parent = path.relative_to(ROOT).with_suffix("").parts[:-1]
    names = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = parent[: len(parent) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def cython_imports(path: Path) -> set[str]:
    """The same for .pyx and .pxd, which ast cannot read; one import a line, as the modules are written."""
    parent = path.relative_to(ROOT).parts[:-1]
    names = set()
    for module, imported, plain in CYTHON_IMPORT.findall(path.read_text()):
        if plain:
            names |= {part.split()[0] for part in plain.split(",")}
            continue
        dots = len(module) - len(module.lstrip("."))
        base = parent[: len(parent) - dots + 1] if dots else ()
        module = ".".join(part for part in (*base, module.lstrip(".")) if part)
        names |= {f"{module}.{part.split()[0]}" for part in imported.strip("( \\").split(",") if part.strip()}
    return names


def sources() -> list[Path]:
    return sorted(p for ext in ("py", "pyx", "pxd") for p in PACKAGE.rglob(f"*.{ext}"))


def imports(path: Path) -> set[str]:
    return python_imports(path) if path.suffix == ".py" else cython_imports(path)


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else path.stem


def room_imports(path: Path) -> set[str]:
    """Rooms of coli, other than its own, that a file imports; ``__init__`` stands for the package itself."""
    rooms = set()
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "coli":
            rooms.add(parts[1] if len(parts) > 1 and parts[1] in LEVEL else "__init__")
    return rooms - {room_of(path)}


def arrows() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in sources():
        found.setdefault(room_of(path), set()).update(room_imports(path))
    return found


def test_import_finder_sees_every_form(tmp_path, monkeypatch):
    """Absolute, relative, late and type-only imports of Python, and imports and cimports of Cython, are all found."""
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    folder = tmp_path / "coli" / "engine"
    folder.mkdir(parents=True)
    python, cython = folder / "a.py", folder / "b.pyx"
    python.write_text(
        "import coli.model\nfrom coli import log\nfrom . import c\nfrom ..tier.heat import d\n"
        "def f():\n    from coli.cli.main import e\nif TYPE_CHECKING:\n    from coli.server.app import g\n"
    )
    cython.write_text(
        "cimport numpy\nfrom coli._core.kernels cimport (table,\n    other)\nfrom ..log import x\nimport a, b\n"
    )
    assert python_imports(python) == {
        "coli.model", "coli.log", "coli.engine.c", "coli.tier.heat.d", "coli.cli.main.e", "coli.server.app.g",
    }  # fmt: skip
    assert cython_imports(cython) == {"numpy", "coli._core.kernels.table", "coli.log.x", "a", "b"}


def test_rooms_of_the_package_are_those_of_the_architecture_page():
    """Every module and folder of coli has its place in the order; a new room is given one here and on the page."""
    rooms = {room_of(p) for p in sources()} - {"__init__", "__main__"}
    assert rooms <= set(LEVEL), f"no place in the order: {sorted(rooms - set(LEVEL))}"


@pytest.mark.parametrize("room", sorted(LEVEL))
def test_imports_of_a_room_point_down(room):
    """A room imports only what lies below it or beside it, `placement` only `errors`, `_core` nothing of coli."""
    for path in sources():
        if room_of(path) == room:
            # the package itself carries __version__ and the errors, which any room may ask for lazily
            for other in room_imports(path) - {"__init__"}:
                where = f"{path.relative_to(ROOT)} imports coli.{other}"
                assert other in ONLY.get(room, {other}), where
                assert LEVEL[other] <= LEVEL[room], where


def test_core_and_placement_do_not_reach_through_the_package():
    """`from coli import ...` would be a way round the arrows for the two rooms that must stand alone."""
    found = arrows()
    for room in ("_core", "placement", "errors"):
        assert "__init__" not in found.get(room, set()), room


def test_rooms_beside_each_other_form_no_circle():
    """Neighbours may use one another in one direction only, however many rooms the way round has."""
    found = arrows()

    def visit(room: str, trail: tuple[str, ...]) -> None:
        assert room not in trail, " -> ".join((*trail[trail.index(room) :], room))
        for other in found.get(room, set()) - {"__init__"}:
            visit(other, (*trail, room))

    for room in LEVEL:
        visit(room, ())


def test_placement_uses_only_pure_modules():
    """Facts in, plan out: placement imports no module that could open a file, start a process or read a clock."""
    for path in sources():
        if room_of(path) == "placement":
            outside = {n.split(".")[0] for n in imports(path)} - {"coli"}
            assert outside <= PURE, f"{path.relative_to(ROOT)}: {sorted(outside - PURE)}"
            calls = {n.func.id for n in ast.walk(ast.parse(path.read_text()))
                     if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}  # fmt: skip
            assert not calls & {"open", "input", "print", "exec", "eval", "__import__"}, path.name


def test_tier_knows_no_cuda():
    """The tier drives a Device; which maker's card it is stays in devices."""
    for path in sources():
        if room_of(path) == "tier":
            assert not [n for n in imports(path) if "cuda" in n], path.name


@pytest.mark.parametrize("module", ["coli", "coli.cli.main"])
def test_import_loads_nothing_heavy(module):
    """`import coli` and the command line's entry load no numpy, no tokenizer, no template engine, no card."""
    code = f"import sys, {module}; print(*sorted({{m.split('.')[0] for m in sys.modules}} & set({HEAVY!r})))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
