"""What ends badly: interrupts, errors in the middle, closing, memory that cannot be had, what nobody holds any more."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import textwrap

import numpy as np
import pytest

from coli._core import step
from coli.container.reader import Container
from coli.convert.synthetic import Synthetic, SyntheticContainer, geometry
from coli.engine import worker
from coli.engine.session import Engine
from coli.errors import ColiError
from conftest import assert_same_bits

NARROW = {"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 101, "hidden_size": 96,
          "moe_intermediate_size": 48, "shared_expert_intermediate_size": 40,
          "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip


@pytest.fixture
def engine(make_container):
    with Container.open(make_container("tiny-random")) as container:
        engine = Engine(container, threads=2)
        yield engine
        engine.close()


def test_interrupt_after_the_answer_is_there_is_raised(monkeypatch):
    """A Ctrl-C that arrives when the job's lock is taken already ends the call; it does not wait for the lock again."""
    thread, real, raised = worker.EngineThread(), worker.Job, threading.Event()

    class Interrupted:
        """A job's lock that is got, and interrupted on the way back."""

        def __init__(self, lock) -> None:
            self._lock, self._calls = lock, 0

        def acquire(self, *args, **kwargs):
            taken = self._lock.acquire(*args, **kwargs)
            self._calls += 1
            if self._calls == 1:
                raise KeyboardInterrupt
            return taken

        def release(self) -> None:
            self._lock.release()

    def make(*args):
        job = real(*args)
        job.done = Interrupted(job.done)
        return job

    monkeypatch.setattr(worker, "Job", make)

    def caller() -> None:
        with pytest.raises(KeyboardInterrupt):
            thread.call(lambda job: None)
        raised.set()

    threading.Thread(target=caller, daemon=True).start()
    assert raised.wait(5), "the call waits for a lock that it holds"


def test_call_that_meets_a_close_is_refused(monkeypatch):
    """A call that finds the thread open and is overtaken by `close` gets an error, not an endless wait."""
    thread, real, ended = worker.EngineThread(), worker.Job, threading.Event()

    def slow(*args):
        closer = threading.Thread(target=thread.close)
        closer.start()
        closer.join(5)
        return real(*args)

    monkeypatch.setattr(worker, "Job", slow)

    def caller() -> None:
        with pytest.raises(ColiError, match="closed"):
            thread.call(lambda job: None)
        ended.set()

    threading.Thread(target=caller, daemon=True).start()
    assert ended.wait(10), "the job lies behind the end of the queue"


def test_session_in_a_cycle_gives_its_memory_back(engine):
    """State that the garbage collector finds is freed like any other: nothing is said, nothing is kept."""
    import psutil

    rss = psutil.Process().memory_info
    gc.collect()
    gc.disable()
    try:
        before = rss().rss
        for _ in range(30):
            session = engine.session()
            session.me = session
            gc.collect(0)  # the session grows old before its K/V is allocated
            session._sequence.reserve(4096)
            n_bytes = session._sequence.kv_bytes
            del session
            gc.collect()
        assert rss().rss - before < 10 * n_bytes
    finally:
        gc.enable()


def test_closed_session_is_refused(engine):
    """A session that was closed does not come back as an empty one."""
    session = engine.session()
    session.prefill([1, 2, 3])
    session.close()
    for _ in range(2):
        with pytest.raises(ColiError, match="closed"):
            session.step(1)
        with pytest.raises(ColiError, match="closed"):
            session.copy()


def test_failed_allocation_leaves_the_engine_usable():
    """A batch too large for the memory is refused; the next one is computed as if it had not been."""
    code = """
        import resource, sys
        import numpy as np
        from coli.convert.synthetic import Synthetic, SyntheticContainer, geometry
        from coli.engine.session import Engine
        config = geometry("small8") | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
            "vocab_size": 256, "num_experts": 8, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
        engine = Engine(SyntheticContainer(Synthetic(config)), threads=1)
        session = engine.session()
        session.prefill([1, 2, 3])
        expected = session.copy().step(5)
        size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + (10 << 20), resource.RLIM_INFINITY))
        try:
            engine.session().prefill([7] * 512)
            sys.exit(3)
        except MemoryError:
            pass
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        sys.exit(0 if np.array_equal(session.copy().step(5), expected) else 4)
    """
    if sys.platform != "linux":
        pytest.skip("needs an address space limit")
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr[-300:])


def test_two_runners_of_one_team_compute_the_same(engine):
    """The numbers that tell shares of work apart belong to the team, whoever runs on it."""
    engine.logits([1, 2, 3])

    def both(job):
        found = []
        for runner in (engine.runner, step.Runner(engine._net, engine.team)):
            sequence, out = step.Sequence(engine._net, 64), np.zeros((1, engine.padded_vocab), np.float32)
            runner.begin([(sequence, 1)], np.array([5], np.int32), engine._rope.cos, engine._rope.sin)
            runner.run(0, runner.n_ops)
            runner.head((0,), out)
            found.append(out)
        return found

    first, second = engine._thread.call(both)
    assert_same_bits(second, first, "the second runner")


def test_fewer_cpus_than_threads_is_refused(make_container):
    """A list of CPUs shorter than the team is an error, not a read behind its end."""
    refused = pytest.raises((ValueError, ColiError), match="1 CPUs")
    with Container.open(make_container("tiny-random")) as container, refused:
        Engine(container, threads=2, cpus=[0])


def test_synthetic_embedding_of_any_size_is_made():
    """An embedding whose bytes are no multiple of 256 is made like any other."""
    container = SyntheticContainer(Synthetic(geometry("small8") | NARROW))
    engine = Engine(container)
    try:
        assert engine.logits([1, 2, 3]).shape == (3, 101)
    finally:
        engine.close()
