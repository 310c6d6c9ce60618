"""Heat on its way to the file: now and then while it runs, on a thread of its own, and at the end."""

from __future__ import annotations

import time
from concurrent.futures import Future
from contextlib import ExitStack

import numpy as np

from coli.errors import ColiError
from coli.log import logger
from coli.threads.side import SideThread
from coli.tier.heat import Heat
from coli.tier.heatfile import HeatFile

SAVE_EVERY_S = 300.0  # a crash loses at most so much heat; a save is a few milliseconds on a thread of its own

_log = logger("tier")


class HeatSaver:
    """Saves a heat's counts.  file : None saves nothing.   save_at : when the next save is due, `time.monotonic`."""

    def __init__(self, heat: Heat, file: HeatFile | None) -> None:
        self._heat = heat
        self._file = file
        self._thread = SideThread("coli-heat")
        self.under_way: tuple[np.ndarray, Future] | None = None
        self.save_at = time.monotonic() + SAVE_EVERY_S
        self._complaint = ""

    def save_if_due(self) -> None:
        """Start a save when it is time."""
        if self._file is None or time.monotonic() < self.save_at:
            return
        self.save_at = time.monotonic() + SAVE_EVERY_S
        self._start()

    def close(self) -> None:
        """End the thread, and save what is not saved: each of it, whatever the one before it raised."""
        with ExitStack() as rest:  # the last one first
            rest.callback(self._save)
            rest.callback(self._thread.shutdown)
            self._finish()

    def _start(self) -> None:
        self._finish()
        delta = self._heat.take_unsaved()
        if delta is None:
            return
        try:
            future = self._thread.submit(self._file.merge, delta)
        except RuntimeError as error:  # the system has no thread to give
            self._not_saved(delta, f"{self._file.path}: no thread to write it: {error}")
        else:
            self.under_way = delta, future

    def _save(self) -> None:
        """On the calling thread: at the end no token waits for it."""
        delta = None if self._file is None else self._heat.take_unsaved()
        if delta is not None:
            try:
                self._file.merge(delta)
            except ColiError as error:
                self._not_saved(delta, str(error))

    def _finish(self) -> None:
        """See how the last save ended; one that failed is said once and its counts go into the next."""
        if self.under_way is None:
            return
        (delta, future), self.under_way = self.under_way, None
        error = future.exception()
        if error is None:
            return
        if not isinstance(error, ColiError):
            raise error
        self._not_saved(delta, str(error))

    def _not_saved(self, delta: np.ndarray, why: str) -> None:
        self._heat.give_back(delta)
        if why != self._complaint:
            self._complaint = why
            _log.warning(f"{why}; the run goes on, its heat is not saved")
