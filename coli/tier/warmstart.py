"""Filling the slots at load, hottest experts first, with progress on a terminal.

One job a device, on the thread that uploads to it, so that two cards fill side by side; the table is changed by the
caller's thread alone.  An upload that fails leaves its slot free and its expert on the CPU.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Event
from typing import NamedTuple

import numpy as np

from coli.devices.base import Device, DeviceError
from coli.log import logger

MAX_FAILURES = 3  # in a row: a device that fails so often is not asked again


class Upload(NamedTuple):
    """An expert on its way into a reserved slot."""

    device: int
    slot: int
    key: int


class Outcome(NamedTuple):
    """How an upload ended; ``upload`` is None when a device's job has ended."""

    upload: Upload | None
    error: DeviceError | None = None


def fill(
    devices: Sequence[Device],
    uploaders: Sequence[Executor],
    uploads: Sequence[Sequence[Upload]],
    slab_of: Callable[[int], np.ndarray],
) -> Iterator[Outcome]:
    """Run the uploads of each device in their order; yields each outcome as it comes.

    A device that is lost, or fails MAX_FAILURES times in a row, or has no thread, is not asked for the rest of its
    uploads: they have no outcome.  Closing the iterator early stops every device at its next expert.
    """
    outcomes: SimpleQueue[Outcome] = SimpleQueue()
    stop = Event()
    jobs: list[Future] = []
    n_bytes = sum(len(slab_of(upload.key)) for mine in uploads for upload in mine)
    try:
        for device, uploader, mine in zip(devices, uploaders, uploads, strict=True):
            if not mine:
                continue
            try:
                jobs.append(uploader.submit(_run, device, mine, slab_of, outcomes, stop))
            except RuntimeError as error:  # the system has no thread to give
                yield Outcome(mine[0], DeviceError(f"no thread for it: {error}", "launch"))
        with _progress(n_bytes) as advance:
            running = len(jobs)
            while running:
                outcome = outcomes.get()
                if outcome.upload is None:
                    running -= 1
                    continue
                advance(len(slab_of(outcome.upload.key)))
                yield outcome
    finally:
        stop.set()
        for job in jobs:
            job.result()  # waits; an error that is no DeviceError is a bug and is raised here


def _run(
    device: Device,
    uploads: Sequence[Upload],
    slab_of: Callable[[int], np.ndarray],
    outcomes: SimpleQueue[Outcome],
    stop: Event,
) -> None:
    failures = 0
    try:
        for upload in uploads:
            if stop.is_set() or failures == MAX_FAILURES:
                break
            try:
                device.write_slot(upload.slot, slab_of(upload.key))
            except DeviceError as error:
                failures = MAX_FAILURES if error.kind == "lost" else failures + 1
                outcomes.put(Outcome(upload, error))
            else:
                failures = 0
                outcomes.put(Outcome(upload))
    finally:
        outcomes.put(Outcome(None))


@contextmanager
def _progress(n_bytes: int) -> Iterator[Callable[[int], object]]:
    from tqdm import tqdm

    # disable=None: no bar where standard error is no terminal
    disable = None if logger("tier").isEnabledFor(logging.INFO) else True
    with tqdm(
        total=n_bytes, unit="B", unit_scale=True, unit_divisor=1024, desc="[tier] experts", disable=disable,
        file=sys.stderr, leave=False,
    ) as bar:  # fmt: skip
        yield bar.update
