"""What a user calls MODEL: the demo, a container, a Hugging Face folder, the id of one on the hub, or a GGUF file.

A Hugging Face folder or a GGUF file is converted once, into the cache directory, under a name made of its files'
names, sizes and times and of the formats; the next use finds it there.  A folder is never asked for its weights to be
recognised.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import coli
from coli.container.manifest import MANIFEST_NAME
from coli.container.reader import JOURNAL_NAME
from coli.container.writer import PARTIAL_SUFFIX
from coli.convert.gguf_file import SUFFIX, first_part, is_gguf
from coli.errors import ModelError
from coli.files import cache_dir
from coli.log import logger

DEMO = "demo"

# As the hub writes ids: owner/name, each a word.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# No model on the hub is called so: who writes one of these ends names a folder or a file.
_LOCAL_SUFFIXES = (".coli", SUFFIX, PARTIAL_SUFFIX, ".safetensors", ".json", ".jinja", ".bin", ".pt", ".pth")
# What the hub's client says of these, at length, in words of our own, by the names of its errors.
_HUB_REASONS = {
    "GatedRepoError": "its owner lets in those who ask: ask on its page there, then log in (hf auth login)",
    "RepositoryNotFoundError": "there is no model of that name, or it is private (hf auth login)",
    "LocalEntryNotFoundError": "it cannot be reached from here, and this model was never fetched whole",
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE keeps it from being asked, and this model was never fetched whole",
}
_LONGEST_REASON = 120
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "tokenizer.json",
              "tokenizer_config.json", "chat_template.jinja"]  # fmt: skip


def resolve_model(name: str) -> Path:
    """The container folder that MODEL means; a checkpoint is converted first, if it never was.

    Raises ModelError saying what was tried.
    """
    path = find_model(name)
    return path if is_container(path) else convert_cached(path)


def find_model(name: str) -> Path:
    """The container, Hugging Face folder or GGUF file that MODEL means; a hub id is downloaded first.

    ``demo`` is the model that ships with coli; a folder of that name is ``./demo``.

    Raises ModelError saying what was tried.
    """
    if name == DEMO:
        return _demo()
    path = Path(name).expanduser()
    if path.is_dir():
        if is_container(path) or ((path / "config.json").is_file() and not (path / JOURNAL_NAME).exists()):
            return path
        if (path / JOURNAL_NAME).exists():
            raise ModelError(f"{path}: an unfinished conversion; run the same coli convert again to finish it")
        inside = min(path.glob(f"*{SUFFIX}"), default=None)
        raise ModelError(
            f"{path}: neither a container ({MANIFEST_NAME}) nor a Hugging Face folder (config.json) is in this folder"
            + (f"; to use the GGUF file in it, name {inside}" if inside else "")
        )
    if is_gguf(path):
        if not path.exists():
            raise ModelError(f"{path}: there is no such file")
        return first_part(path)
    if path.exists():
        raise ModelError(
            f"{path}: a file; MODEL is a folder: a container or a Hugging Face checkpoint (or a file *{SUFFIX})"
        )
    if (unfinished := path.with_name(path.name + PARTIAL_SUFFIX)).is_dir():
        raise ModelError(f"{path}: not there, but {unfinished} is: finish that conversion with the same coli convert")
    if _HUB_ID.fullmatch(name):
        if reason := _why_a_path(name):
            raise ModelError(f"{name}: there is no such folder or file (the Hugging Face hub is not asked: {reason})")
        return download(name)
    raise ModelError(f"{name}: no such folder, not the name of the demo model ({DEMO}), and not a hub id (owner/name)")


def _why_a_path(name: str) -> str | None:
    """Why a name that could be a hub id is rather a path that was mistyped; None where it is not."""
    if name.lower().endswith(_LOCAL_SUFFIXES):
        return f"a name that ends in {Path(name).suffix} is a path"
    first = Path(name).parts[0]
    return f"{first} is a folder here" if Path(first).is_dir() else None


def is_container(path: Path) -> bool:
    """Whether a folder holds a finished container."""
    return (path / MANIFEST_NAME).is_file()


def download(repository: str) -> Path:
    """Fetch a checkpoint from the Hugging Face hub into its own cache (HF_HOME); returns the snapshot's folder.

    Works offline once it has been fetched.  Raises ModelError with the hub's reason.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ModelError(
            f"{repository}: no such folder; to fetch it from the Hugging Face hub, pip install coli[hub]"
        ) from None
    logger("load").info("%s: no such folder; asking the Hugging Face hub", repository)
    try:
        return Path(snapshot_download(repository, allow_patterns=_HUB_FILES))
    except Exception as error:  # its transports raise types of many packages; each ends as one line here
        reason = _hub_reason(error)
        raise ModelError(f"{repository}: no such folder, and the Hugging Face hub gave no model: {reason}") from None


def _hub_reason(error: Exception) -> str:
    """Why the hub gave nothing, in one clause: ours, or the first that its client says."""
    for one in (error.__cause__, error):  # its own first: "not found here" has "and I may not ask" behind it
        for kind in type(one).__mro__:
            if kind.__name__ in _HUB_REASONS:
                return _HUB_REASONS[kind.__name__]
    said = re.split(r"[.:;] (?=[A-Z])", " ".join(str(error).split()))[0]
    return said[:_LONGEST_REASON] or type(error).__name__


def convert_cached(src: str | Path) -> Path:
    """The container of a checkpoint, in the default formats, from the cache; converted where it is not there.

    Two processes that ask at once convert once: the second waits.

    Raises ModelError: the checkpoint cannot be converted, or the cache cannot be written.
    """
    # A container needs neither the quantiser nor tqdm; a checkpoint does.
    from coli.convert.convert import Options, convert, source_name
    from coli.convert.gguf import open_checkpoint

    src = Path(src)
    src = src.resolve() if src.is_dir() else src.parent.resolve() / src.name  # the hub's cache links names to blobs
    with open_checkpoint(src) as checkpoint:
        identity = {"path": str(src), "options": vars(Options()), "coli": coli.__version__} | checkpoint.fingerprint()
        size_bytes = checkpoint.n_bytes
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_dir()
    dst = folder / f"{source_name(src).replace('/', '--')}-{key}"
    log = logger("load")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"{folder}: the cache directory cannot be made: {error.strerror}") from None
    with _locked(folder / f"{dst.name}.lock"):
        if is_container(dst):
            log.info("%s: using its container in the cache: %s", src, dst)
            return dst
        log.info("%s: converting %s bytes once, into the cache: %s", src, f"{size_bytes:,}", dst)
        done = convert(src, dst)
        log.info("%s: %s bytes; later uses take it from there", dst, f"{done.n_bytes:,}")
    return dst


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file; say so when another process has it."""
    try:
        with open(path, "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger("load").info("another process is converting this checkpoint; waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise ModelError(f"{path}: cannot be locked: {error.strerror}") from None


def _demo() -> Path:
    path = Path(coli.__file__).parent / "data" / DEMO
    if not is_container(path):
        raise ModelError(
            f"{path}: the demo model is not part of this installation; install coli from its wheel or sdist"
        )
    return path
