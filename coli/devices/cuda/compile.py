"""kernels/*.cu -> one cubin for one architecture, kept on disk.

Always a cubin, never PTX: NVRTC may be newer than the driver, and a driver refuses PTX that is newer than itself.
The first compile takes seconds; the cache is keyed by the text, the options and the architecture, so an edited kernel
or another card compiles anew and nothing stale is ever loaded.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from coli.devices.base import DeviceError
from coli.errors import ColiError
from coli.files import cache_dir
from coli.log import logger

FILES = (
    "contract.cu", "parts.cu", "products.cu", "gemm.cu", "dense.cu", "hop.cu", "deltanet.cu",
    "attention.cu", "route.cu",
)  # fmt: skip
"""In the order in which they are put together; the first is what the others are made of."""

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""What the kernels are checked for.  Any other from sm_75 on compiles for itself."""


@cache
def source() -> str:
    """The text of all kernels."""
    folder = resources.files("coli.devices.cuda") / "kernels"
    return "\n".join(f'#line 1 "{name}"\n' + (folder / name).read_text("utf-8") for name in FILES)


def cache_folder() -> Path:
    """Where cubins are kept."""
    return cache_dir() / "cuda"


def compile_cubin(arch: str, text: str | None = None) -> bytes:
    """The cubin of ``text`` (default: all kernels) for ``arch``, such as "sm_90".

    Raises DeviceError where NVRTC is missing or refuses, with its first complaint.
    """
    from cuda.core import Program, ProgramOptions

    # fma=False is the contract's first rule; the intrinsics say it a second time (docs/numerics.md, section 1)
    options = ProgramOptions(arch=arch, std="c++17", fma=False)
    text = source() if text is None else text
    try:
        program = Program(text, "c++", options)
        return bytes(program.compile("cubin", cache=_cache()).code)
    except Exception as error:  # cuda.core's errors have no public base but Exception
        complaint = next((line for line in str(error).splitlines() if ": error" in line), str(error)[:200])
        raise DeviceError(f"the kernels do not compile for {arch}: {complaint.strip()}", "launch") from error


def _cache() -> Any:
    """The cache on disk (cuda.core.utils.FileStreamProgramCache); None where its folder cannot be written."""
    from cuda.core.utils import FileStreamProgramCache

    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        return FileStreamProgramCache(folder)
    except (OSError, ColiError) as error:
        logger("cuda").debug("compiled kernels are not kept: %s", error)
        return None
