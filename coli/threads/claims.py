"""Who uses which core: advisory locks, so that two coli processes of one user take different cores where they can.

One lock file per logical CPU, ``cpu-N.lock``, in the user's runtime folder.  A process holds the locks of its CPUs for
as long as its engine lives; the kernel drops them when it dies, however it dies.  The locks belong to the open file
(``flock``), so two engines in one process keep apart as well.  Where the folder cannot be used the choice goes on
without: the locks are a courtesy, never a condition.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from coli.log import logger
from coli.threads.binding import Binding, choose_cpus
from coli.threads.limits import Limits, local_machine
from coli.threads.numa import choose_policy, memory_policy
from coli.threads.topology import Topology
from coli.threads.tuning import load_profile, machine_fingerprint

try:
    import fcntl
except ImportError:  # not a POSIX system: nothing to lock with, and nothing to pin with either
    fcntl = None  # type: ignore[assignment]

# How long to wait for another process that is choosing at this moment.  Choosing takes about a millisecond; a holder
# that was stopped in the middle must not stop us too.
_TURN_S = 1.0


class Claim:
    """A binding and the locks on its CPUs.  A context manager; ``release`` may be called twice."""

    def __init__(self, binding: Binding, topology: Topology, files: Iterable[int] = ()) -> None:
        self.binding = binding
        self.topology = topology
        self._files = list(files)

    def memory(self, weights_bytes: int) -> AbstractContextManager[bool]:
        """Hold the memory policy that suits this team while the engine's thread is started, which then inherits it."""
        return memory_policy(choose_policy(self.topology, self.binding.cpus, weights_bytes))

    def release(self) -> None:
        """Give the CPUs back."""
        while self._files:
            os.close(self._files.pop())

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


def claim_threads(
    threads: int | str | None = None,
    *,
    geometry: str | None = None,
    openmp_built: bool = True,
    machine: tuple[Topology, Limits] | None = None,
    folder: Path | None = None,
) -> Claim:
    """Choose the team's CPUs on this machine and hold them; the warnings go to ``[threads]``.

    Parameters
    ----------
    threads, openmp_built : as in ``binding.choose_cpus``.
    geometry : the model's key (``tuning.geometry_key``), for what ``coli tune`` found for it here; None: use nothing.
    machine, folder : another machine and runtime folder than this one's.
    """
    topology, found = machine or local_machine()
    profile = load_profile(machine_fingerprint(topology, found), geometry) if geometry else None

    def choose(busy: frozenset[int]) -> Binding:
        return choose_cpus(
            topology,
            found.allowed,
            found.quota_cpus,
            threads,
            busy=busy,
            tuned=profile.cpus if profile else None,
            openmp_built=openmp_built,
        )

    binding, files = hold(choose, found.allowed, folder)
    for warning in binding.warnings:
        logger("threads").warning(warning)
    return Claim(binding, topology, files)


def hold(
    choose: Callable[[frozenset[int]], Binding], allowed: Iterable[int], folder: Path | None = None
) -> tuple[Binding, list[int]]:
    """Ask ``choose`` for a binding, given the CPUs that other engines hold, and lock what it chose.

    Looking and locking happen in one turn, under a lock of their own, so two processes that start together do not both
    take what both saw free.  Returns the binding and the open files that hold the locks.
    """
    try:
        folder = runtime_folder() if folder is None else folder
        turn = _open(folder / "choosing.lock")
    except OSError as error:
        logger("threads").debug("cores are chosen without regard to other coli processes: %s", error)
        return choose(frozenset()), []
    files: list[int] = []
    try:
        _wait_for(turn)
        binding = choose(_held(folder, allowed))
        for cpu in dict.fromkeys(binding.cpus):
            file = _open(folder / f"cpu-{cpu}.lock")
            if _lock(file):
                files.append(file)
            else:
                os.close(file)  # shared with its holder: the binding says so
        return binding, files
    finally:
        os.close(turn)


def held_cpus(allowed: Iterable[int], folder: Path | None = None) -> frozenset[int]:
    """The logical CPUs that coli processes of this user hold now; none where that cannot be told."""
    try:
        return _held(runtime_folder() if folder is None else folder, allowed)
    except OSError:
        return frozenset()


def runtime_folder() -> Path:
    """The user's folder for lock files: in XDG_RUNTIME_DIR, else a private one beside the temporary files.

    Raises OSError where there is none that only this user can write.
    """
    if fcntl is None:
        raise OSError("no flock on this system")
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base, "coli") if base else Path(tempfile.gettempdir(), f"coli-{os.getuid()}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # In a shared temporary folder somebody else may have taken the name.
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise OSError(f"{folder} belongs to another user")
    return folder


def _held(folder: Path, allowed: Iterable[int]) -> frozenset[int]:
    held = set()
    for cpu in allowed:
        path = folder / f"cpu-{cpu}.lock"
        if not path.exists():
            continue
        file = _open(path)
        # A shared lock is refused while a holder has its own, and two lookers do not mistake each other for one.
        if not _lock(file, shared=True):
            held.add(cpu)
        os.close(file)
    return frozenset(held)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0), 0o600)


def _lock(file: int, shared: bool = False) -> bool:
    """Lock without waiting; False where another open file holds it."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for(file: int) -> None:
    end = time.monotonic() + _TURN_S
    while not _lock(file) and time.monotonic() < end:
        time.sleep(0.005)
