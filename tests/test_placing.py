"""coli/placing.py when loading ends early: nothing that was begun goes on, and the devices are given back."""

from __future__ import annotations

import signal
import threading
import time

import numpy as np
import pytest

import coli
from coli.devices.fake import FakeDevice
from coli.engine import worker

MIB = 1 << 20


class Bug(RuntimeError):
    """Not a DeviceError: nothing falls back from it."""


@pytest.fixture(scope="module")
def path(make_container):
    return str(make_container("tiny-random"))


@pytest.fixture
def begun():
    """The threads that the test has started and that still run, by name."""
    before = set(threading.enumerate())
    return lambda: sorted(thread.name for thread in threading.enumerate() if thread not in before)


def raising(error):
    def raises(*_):
        raise error

    return raises


@pytest.mark.parametrize("call", ["open_arena", "upload", "seat", "write_slot", "mixer", "layer", "span"])
@pytest.mark.parametrize("error", [Bug("a bug"), KeyboardInterrupt()])
def test_load_that_raises_ends_its_threads_and_closes_its_devices(path, begun, call, error):
    """Whichever call to a device raises what is no DeviceError, both devices are closed and no thread is left."""
    devices = [FakeDevice(64 * MIB, name=name) for name in "ab"]
    for device in devices:
        setattr(device, call, raising(error))
    with pytest.raises(type(error)) as caught:
        coli.load(path, devices=devices, threads=2)
    assert caught.value is error
    assert [] == begun()
    assert [("close",), ("close",)] == [device.calls[-1] for device in devices]


def test_device_that_does_not_close_keeps_no_other_open(path, begun):
    """An error of a close is raised when all have been closed."""
    devices = [FakeDevice(64 * MIB, name=name) for name in "abc"]
    for device in devices:
        device.seat = raising(Bug("a bug"))
    devices[1].close = raising(Bug("it does not close"))
    with pytest.raises(Bug, match="it does not close"):
        coli.load(path, devices=devices, threads=2)
    assert [] == begun()
    assert [("close",), ("close",)] == [device.calls[-1] for device in (devices[0], devices[2])]


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no signals to threads on this system")
def test_interrupted_load_ends_its_threads_and_closes_its_devices(path, begun, monkeypatch):
    """Ctrl-C while the last piece is made: it is made to its end, and then given back, for nobody waits for it."""
    device, caller = FakeDevice(64 * MIB), threading.get_ident()
    span, jobs, told = device.span, [], []

    class Seen(worker.Job):
        """A job that is known to the test, the last one only."""

        __slots__ = ()

        def __init__(self, *arguments):
            super().__init__(*arguments)
            jobs[:] = [self]

    def interrupted(*arguments):
        signal.pthread_kill(caller, signal.SIGINT)
        end = time.monotonic() + 20
        while not jobs[0].cancelled and time.monotonic() < end:
            time.sleep(0.001)
        told.append(jobs[0].cancelled)
        return span(*arguments)

    device.span = interrupted
    with monkeypatch.context() as patch:
        patch.setattr(worker, "Job", Seen)
        with pytest.raises(KeyboardInterrupt):
            coli.load(path, devices=[device], threads=2)
    assert [True] == told
    assert [] == begun()
    assert ("close",) == device.calls[-1]
    del device.span
    with coli.load(path, devices=[device], threads=2) as model:
        assert np.isfinite(model.session().prefill([1, 2, 3])).all()
