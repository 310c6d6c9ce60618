"""coli: hybrid mixture-of-experts language models on the machine you have.

    import coli
    with coli.load("demo") as model:
        for piece in model.generate("It is a truth universally acknowledged, that", max_tokens=40):
            print(piece, end="")

Importing the package loads nothing heavy: numpy, tokenizers, jinja2 and the kernels come with the first model.
"""

from __future__ import annotations

from coli.errors import BackendError, ColiError, ModelError, PlacementError, RequestError

TYPE_CHECKING = False  # type checkers read this name as true; importing typing for it would cost every `coli --help`
if TYPE_CHECKING:
    from typing import Any

    from coli.model import Model, load

__version__ = "0.1.0"
__all__ = ["BackendError", "ColiError", "Model", "ModelError", "PlacementError", "RequestError", "load"]


def __getattr__(name: str) -> Any:
    if name in ("Model", "load"):
        from coli import model

        return getattr(model, name)
    raise AttributeError(f"module 'coli' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
