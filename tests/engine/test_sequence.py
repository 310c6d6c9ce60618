"""What a sequence keeps in the host's memory: nothing of layers that are elsewhere, and full K/V blocks only once."""

from __future__ import annotations

import numpy as np
import pytest
from engine.standins import MiB

import coli
from coli._core import step
from coli.container.reader import Container
from coli.devices.fake import FakeDevice
from coli.engine.session import Engine
from conftest import assert_same_bits

IDS = np.random.default_rng(6).integers(0, 256, 300)
TRUNK = "dnproj=0,dnout=0,attnproj=0,experts=cpu"


@pytest.fixture(scope="module")
def engine(path):
    with Container.open(path) as container:
        engine = Engine(container, threads=2, context=512)
        yield engine
        engine.close()


def test_layers_that_are_elsewhere_take_no_memory(engine):
    """Their states and K/V are not here, and a layer that is, is laid out as ever."""
    all_here, one_of_each, none = (step.Sequence(engine._net, 512) for _ in range(3))
    one_of_each.leave([0, 1, 2, 3])
    none.leave(range(8))
    for sequence in (all_here, one_of_each, none):
        sequence.reserve(130)
        assert sequence.kv_bytes == all_here.kv_bytes and sequence.recurrent_bytes == all_here.recurrent_bytes
    assert all_here.memory_bytes == all_here.kv_bytes + all_here.recurrent_bytes
    assert (one_of_each.memory_bytes, none.memory_bytes) == (all_here.memory_bytes // 2, 0)
    with pytest.raises(ValueError, match="not here"):
        one_of_each.state(0)
    with pytest.raises(ValueError, match="not here"):
        one_of_each.kv_block(0, 0, False)
    assert np.asarray(one_of_each.state(3)).shape == np.asarray(all_here.state(3)).shape
    with pytest.raises(ValueError, match="has begun"):
        one_of_each.leave([])
    with pytest.raises(ValueError, match="layer 8 of 8"):
        step.Sequence(engine._net, 512).leave([8])


@pytest.mark.parametrize("n", [1, 63, 64, 65, 130])
def test_copy_shares_full_blocks_and_nothing_else(engine, n):
    """Both go on from where the copy was made, each by itself; blocks that are full are in memory once."""
    session = engine.session()
    session.prefill(IDS[:n])
    reference = engine.session()
    reference.prefill(IDS[:n])
    copied = session.copy()
    blocks = [[np.asarray(s._sequence.kv_block(0, b, False)).ctypes.data for b in range(-(-n // 64))]
              for s in (session, copied)]  # fmt: skip
    assert [a == b for a, b in zip(*blocks)] == [True] * (n // 64) + [False] * (n % 64 > 0)
    other = engine.session()
    other.prefill(IDS[:n])
    assert_same_bits(copied.prefill(IDS[200:270]), other.prefill(IDS[200:270]), "copy")
    assert_same_bits(session.prefill(IDS[100:170]), reference.prefill(IDS[100:170]), "original")
    session.close()
    assert_same_bits(copied.step(1), other.step(1), "copy that survives")


def test_session_whose_layers_are_on_a_card_takes_no_memory_of_the_host(path):
    """States on a card are nowhere else; those that come back for want of memory are, for their session alone."""
    device = FakeDevice(64 * MiB)
    with coli.load(path, devices=[device], place=TRUNK, threads=2, context=512) as model, coli.load(
        path, devices="none", threads=2, context=512
    ) as cpu:
        session, reference = model.session(), cpu.session()
        assert_same_bits(session.prefill(IDS[:60]), reference.prefill(IDS[:60]), "on the card")
        assert session._sequence.memory_bytes == 0 and session.size_bytes == reference.size_bytes > 0
        device.set_free_bytes(device._arena.size + device._beside_bytes + 10)
        assert_same_bits(session.prefill(IDS[60:70]), reference.prefill(IDS[60:70]), "keys and values moved")
        assert session._sequence.memory_bytes == session._sequence.kv_bytes
        copied, of_reference = session.copy(), reference.copy()
        device.set_free_bytes(64 * MiB)
        ids = [IDS[:2].astype(np.int32), IDS[5:6].astype(np.int32)]
        fresh, out = model.session(), np.empty((2, model.engine.vocab_size), np.float32)
        batch = list(zip((session, fresh), ids, strict=True))
        model.engine.on_thread(lambda: model.engine.forward(batch, [1, 2], out))
        assert_same_bits(out[0], reference.prefill(IDS[:2]), "a batch of both kinds, the one with host memory")
        assert_same_bits(out[1], cpu.session().prefill(IDS[5:6]), "a batch of both kinds, the one without")
        assert_same_bits(copied.step(9), of_reference.step(9), "copy")
        assert fresh._sequence.memory_bytes == 0
