"""Where coli keeps what it has made, and how a file is replaced so that nobody ever reads half of one."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from coli.errors import ColiError


def cache_dir() -> Path:
    """``$XDG_CACHE_HOME/coli``, or ``~/.cache/coli``; it need not be there.

    A relative XDG_CACHE_HOME counts as none, as the XDG base directory specification has it.
    Raises ColiError where there is no home folder either.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            raise ColiError("there is no home folder for coli's cache; set XDG_CACHE_HOME to a writable one") from None
    return base / "coli"


def replace_file(path: Path, data: bytes, temporary: Path | None = None, mode: int = 0o666) -> None:
    """Give a file new content, on the disk when this returns; a reader, a crash or an error finds the old or the new.

    temporary : the name to write to first, in the same folder.  For callers who hold a lock: what a kill leaves there
        is overwritten the next time.  None: a name of this call alone.
    mode : of a new file, less the process's umask; one that is there keeps its own.   Raises OSError.
    """
    temporary = path.parent / f".coli-{secrets.token_hex(8)}.tmp" if temporary is None else temporary
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(file.fileno(), stat.S_IMODE(os.stat(path).st_mode))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
