"""coli._core.cudalaunch over entry points made here: what is copied, what is waited for, what codes come back."""

from __future__ import annotations

import ctypes
import threading
import time

import numpy as np
import pytest
from coli._core.cudalaunch import SILENT, TIMED_OUT, Launcher

NOT_READY, ILLEGAL_ADDRESS = 600, 700
ONE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
TWO = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


def address(entry) -> int:
    return ctypes.cast(entry, ctypes.c_void_p).value


class Driver:
    """Entry points that record, and answer what they are told."""

    def __init__(self, *, on_launch=lambda: None, launch=0, query=NOT_READY, context=0, limit_s=0.05):
        self.calls = []
        self.flag = np.zeros(1, np.uint32)
        self.x, self.y = np.full(64, np.nan, np.float32), np.arange(64, dtype=np.float32)

        def launched(graph, stream):
            self.calls.append((graph, stream))
            on_launch()
            return launch

        self._held = ONE(lambda c: context), TWO(launched), ONE(lambda s: query)
        self.launcher = Launcher(7, *map(address, self._held), limit_s)

    def call(self, rows, out):
        flag, x, y = (a.ctypes.data for a in (self.flag, self.x, self.y))
        return self.launcher.call(rows, x, 8, 11, 22, flag, 1, y, out)


def rows(n: int = 2) -> np.ndarray:
    return np.arange(n * 10, dtype=np.float32).reshape(n, 10)[:, :5]  # a view: its rows are 10 apart


def test_call_copies_rows_in_and_the_answer_out():
    """Rows are laid out at the stride, the graph is launched on the stream, the answer fills a strided view."""
    driver = Driver(on_launch=lambda: driver.flag.__setitem__(0, 1))
    whole = np.zeros((2, 9), np.float32)
    assert driver.call(rows(), whole[:, :6]) == 0
    assert driver.calls == [(11, 22)]
    assert (driver.x[[0, 1, 2, 3, 4, 8, 9, 10, 11, 12]] == rows().reshape(-1)).all()
    assert (whole[:, :6] == np.arange(12).reshape(2, 6)).all() and not whole[:, 6:].any()


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"launch": 701}, 701),
        ({"context": 201}, 201),
        ({"query": ILLEGAL_ADDRESS}, ILLEGAL_ADDRESS),
        ({"query": 0}, SILENT),
        ({"query": NOT_READY}, TIMED_OUT),
    ],
)
def test_call_that_fails_returns_the_code_and_copies_nothing(options, code):
    """Whatever goes wrong, the answer's place is left as it was."""
    driver, out = Driver(**options), np.full((2, 6), 5, np.float32)
    assert driver.call(rows(), out) == code
    assert (out == 5).all()
    assert bool(driver.calls) == ("context" not in options)


def test_wait_lets_other_threads_run():
    """While the flag is down the GIL is free: another thread raises it."""
    driver, out = Driver(limit_s=5), np.empty((1, 4), np.float32)
    raiser = threading.Thread(target=lambda: (time.sleep(0.02), driver.flag.__setitem__(0, 3)))
    raiser.start()
    assert driver.launcher.take(driver.flag.ctypes.data, 3, 22, driver.y.ctypes.data, out) == 0
    raiser.join()
    assert out.tolist() == [[0, 1, 2, 3]]


def test_issue_writes_the_job_list():
    """A job is the slot's address, the row of x and the row of the answer."""
    driver = Driver()
    jobs = np.zeros(3, [("slab", "<u8"), ("row", "<i4"), ("out", "<i4")])
    slots, of = np.array([2, 0, 2], np.int32), np.array([1, 0, 0], np.int32)
    assert (
        driver.launcher.issue(rows(), driver.x.ctypes.data, 8, 11, 22, slots, of, 1 << 40, 256, 3, jobs.ctypes.data)
        == 0
    )
    assert jobs["slab"].tolist() == [(1 << 40) + 512, 1 << 40, (1 << 40) + 512]
    assert (jobs["row"].tolist(), jobs["out"].tolist()) == ([1, 0, 0], [0, 1, 2])
    assert driver.calls == [(11, 22)]


@pytest.mark.parametrize(("slot", "row"), [(3, 0), (-1, 0), (0, 2)])
def test_issue_out_of_range_launches_nothing(slot, row):
    """A slot or a row that is not there is an IndexError before anything starts."""
    driver, jobs = Driver(), np.zeros(16, np.uint8)
    with pytest.raises(IndexError):
        driver.launcher.issue(rows(), driver.x.ctypes.data, 8, 11, 22, np.array([slot], np.int32),
                              np.array([row], np.int32), 0, 256, 3, jobs.ctypes.data)  # fmt: skip
    assert driver.calls == []
