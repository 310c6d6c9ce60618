"""Heat on its way to the file: now and then while it runs, and at the end; on a thread of its own."""

from __future__ import annotations

import time
from concurrent.futures import Future

import numpy as np

from coli.errors import ColiError
from coli.log import logger
from coli.tier.heat import Heat
from coli.tier.heatfile import HeatFile
from coli.tier.sidethread import SideThread

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
        """Save what is not saved, and end the thread."""
        self._start()
        self._finish()
        self._thread.shutdown()

    def _start(self) -> None:
        self._finish()
        delta = None if self._file is None else self._heat.take_unsaved()
        if delta is not None:
            self.under_way = delta, self._thread.submit(self._file.merge, delta)

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
        self._heat.give_back(delta)
        if str(error) != self._complaint:
            self._complaint = str(error)
            _log.warning(f"{error}; the run goes on, its heat is not saved")
