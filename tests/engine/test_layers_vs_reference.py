"""The engine against the contract in numpy: every layer's values equal to the last bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import reference as ref

from coli._core import kernels
from coli.container.reader import Container
from coli.engine.session import Engine
from coli.engine.trace import trace
from conftest import FIXTURES, assert_same_bits

DEMO = Path(__file__).parents[2] / "coli" / "data" / "demo"
# (trunk bits, expert bits, expert scales): every number format as trunk and as expert, and the 16-bit container
FORMATS = [(8, 4, "group"), (8, 4, "row"), (8, 8, "group"), (8, 8, "row"), (4, 4, "group"), (16, 16, "group")]
PATHS = [isa for isa in kernels.available() if isa != "amx"]  # amx is avx512vnni's prefill, not a choice of its own


@pytest.fixture(scope="module")
def expected_of():
    """expected_of(path, ids) -> the reference's forward pass, computed once for all kernel paths."""
    known: dict = {}

    def get(path: Path, ids: np.ndarray) -> dict:
        key = (path, ids.tobytes())
        if key not in known:
            known[key] = ref.Reference.open(path).forward(ids)
        return known[key]

    return get


def longest_prompt(name: str) -> np.ndarray:
    oracle = np.load(FIXTURES / name / "oracle.npz")
    return max((oracle[key] for key in oracle.files if key.endswith("_ids")), key=len)


def demo_prompt() -> np.ndarray:
    """100 ids: across a border of attention's chunks, and enough to choose most of the experts."""
    return np.random.default_rng(0).integers(0, 4000, 100).astype(np.int32)


def assert_same_pass(found: dict, expected: dict) -> None:
    """Compare in the order of the computation, so that the first difference names the operation that made it."""
    assert_same_bits(found["hidden"][0], expected["hidden"][0], "embedding")
    for layer in range(len(expected["mixer_out"])):
        if layer in expected["state"]:
            assert_same_bits(found["conv"][layer][1:], expected["conv"][layer], f"layer {layer} raw rows")
            assert_same_bits(found["state"][layer], expected["state"][layer], f"layer {layer} state")
        else:
            for name, stored in zip(("key", "value"), expected["kv"][layer], strict=True):
                assert_same_bits(found[name][layer], stored.transpose(1, 0, 2), f"layer {layer} {name}")
        for name in ("mixer_out", "router_logits"):
            assert_same_bits(found[name][layer], expected[name][layer], f"layer {layer} {name}")
        np.testing.assert_array_equal(found["router_idx"][layer], expected["router_idx"][layer])
        assert_same_bits(found["router_w"][layer], expected["router_w"][layer], f"layer {layer} router_w")
        assert_same_bits(found["hidden"][layer + 1], expected["hidden"][layer + 1], f"layer {layer} output")
    assert_same_bits(found["logits"], expected["logits"], "logits")


@pytest.mark.parametrize("isa", PATHS)
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("name", ["tiny-random", "tiny-textonly"])
def test_layers_of_a_fixture_equal_the_reference(make_container, expected_of, name, formats, isa):
    """Every intermediate value of every format and kernel path has the bits of the reference."""
    trunk, expert, scales = formats
    path = make_container(name, trunk_bits=trunk, expert_bits=expert, expert_scales=scales)
    ids = longest_prompt(name)
    with Container.open(path) as container:
        engine = Engine(container, threads=2, isa=isa)
        try:
            assert_same_pass(trace(engine, ids), expected_of(path, ids))
        finally:
            engine.close()


@pytest.mark.parametrize("isa", PATHS)
def test_layers_of_the_demo_equal_the_reference(expected_of, isa):
    """The shipped model, whose four experts a token make the rank order visible, has the reference's bits."""
    ids = demo_prompt()
    with Container.open(DEMO) as container:
        engine = Engine(container, threads=2, isa=isa)
        try:
            assert_same_pass(trace(engine, ids), expected_of(DEMO, ids))
        finally:
            engine.close()


def test_decode_of_the_demo_equals_the_reference(expected_of):
    """One token at a time, which is another path through the step, gives the reference's logits row by row."""
    ids = demo_prompt()
    expected = expected_of(DEMO, ids)["logits"]
    with Container.open(DEMO) as container:
        engine = Engine(container, threads=2)
        try:
            session = engine.session()
            for at, token in enumerate(ids):
                assert_same_bits(session.step(int(token)), expected[at], f"position {at}")
        finally:
            engine.close()
