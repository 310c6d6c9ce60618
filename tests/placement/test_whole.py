"""coli/placement/whole.py: a card pays for the state that it keeps, whoever plans it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import coli
from coli.cli.main import main
from coli.devices.fake import FakeDevice
from coli.placement import DeviceFacts, ModelShape, default_reserve_bytes, with_whole_layers
from coli.placement.whole import whole_layer_bytes

QWEN = {"model_type": "qwen3_5_moe_text", "num_hidden_layers": 40, "max_position_embeddings": 262144}
MIB = 1 << 20


SHAPE = ModelShape.from_config(QWEN)


def test_state_vectors_and_keys_of_the_35b():
    """62 MiB of recurrent state, 19 MiB beside the projections, and 20 KiB a position in steps of 1,024."""
    bytes_of = whole_layer_bytes(SHAPE, "auto", 8192, 10**9)
    assert {"dnproj": SHAPE.state_bytes + 30 * (131072 + 524288 + 4096), "attnproj": 160 * MIB + 10 * 8192} == bytes_of
    assert bytes_of == whole_layer_bytes(SHAPE, "auto", 7169, 10**9)
    assert ["attnproj"] == list(whole_layer_bytes(SHAPE, "attnproj=0,dnproj=0", 1, 10**9))
    assert ["dnproj"] == list(whole_layer_bytes(SHAPE, "dnproj=0,dnout=0", 1, 10**9))
    assert {} == whole_layer_bytes(SHAPE, "experts=0", 1, 10**9)


@pytest.mark.parametrize(
    "place, kinds",
    [
        ("off", ([], [])),
        ("auto:time", (["dnproj", "attnproj"],) * 2),
        ("dnproj=cpu,dnout=cpu,attnproj=cpu,experts=0", ([], [])),
        ("dnproj=0,dnout=0,attnproj=0,experts=1", (["dnproj", "attnproj"], [])),
        ("dnproj=0,dnout=1,attnproj=0:20+1:20", (["attnproj"], ["attnproj"])),
        ("lmhead=0,dnproj=0:20+1:20,dnout=0:20+1:20,experts=0", (["dnproj"], ["dnproj"])),
    ],
)
def test_only_cards_that_may_hold_a_kind_whole_pay_for_it(place, kinds):
    """A list decides for each device by itself, and a name that it puts on the CPU is on no device."""
    found = tuple(list(whole_layer_bytes(SHAPE, place, 8192, 10**9, device)) for device in range(2))
    assert kinds == found


def test_no_kind_takes_more_than_a_sixteenth():
    """A small card keeps its room for weights; of a long context, only so much as fits has room for its keys."""
    tiny, small, large = (
        with_whole_layers(DeviceFacts("a", n), SHAPE, "auto", 8192, span_bytes=0).facts
        for n in (MIB, 2**30, 10**10)
    )
    assert ((), 0) == (tiny.whole_layers, tiny.layer_bytes)
    assert (("attnproj",), 60 * MIB + 81920) == (small.whole_layers, small.layer_bytes)
    assert ("dnproj", "attnproj") == large.whole_layers
    assert sum(whole_layer_bytes(SHAPE, "auto", 8192, 10**9).values()) == large.layer_bytes


@given(st.integers(0, 3 * 10**10), st.integers(1, 262144), st.integers(1, 262144))
def test_longer_context_never_leaves_more_for_weights(free_bytes, one, other):
    """Whatever the card: the charge grows with the context, and neither kind comes or goes with it."""
    short, long = (
        with_whole_layers(DeviceFacts("a", free_bytes), SHAPE, "auto", n, span_bytes=0).facts
        for n in sorted((one, other))
    )
    assert short.whole_layers == long.whole_layers
    assert short.layer_bytes <= long.layer_bytes <= 2 * free_bytes // 16


@pytest.mark.parametrize("span_bytes, runs", [(None, False), (MIB, True), (64 * MIB, True), (64 * MIB + 1, False)])
def test_runs_of_layers_are_charged_where_they_fit(span_bytes, runs):
    """A sixteenth too; a card that takes none, or has no room for what they take, still takes layers one by one."""
    without = with_whole_layers(DeviceFacts("a", 2**30), SHAPE, "auto", 8192)
    found = with_whole_layers(DeviceFacts("a", 2**30), SHAPE, "auto", 8192, span_bytes=span_bytes)
    assert without.kinds == found.kinds != ()
    assert (found.kinds if runs else ()) == found.facts.whole_layers
    assert (span_bytes if runs else 0) == found.span_bytes
    assert without.facts.layer_bytes + found.span_bytes == found.facts.layer_bytes


@pytest.mark.parametrize(
    "place", ["auto", "experts=0", "attnproj=0,experts=0", "lmhead=0,dnproj=0,dnout=0,attnproj=0,shexp=0"]
)
def test_plan_of_the_command_line_is_that_of_loading(place, capsys, monkeypatch, tmp_path):
    """coli plan and coli.load charge the same card alike: the same table, to the byte."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no heat of earlier runs
    with coli.load("demo", devices=[FakeDevice(64 * MIB)], place=place, threads=1, context=2048) as model:
        loaded = model.stats()["plan"]
    assert 0 == main(["plan", "demo", "--devices", "fake:64MiB", "--place", place, "--context", "2048", "--json"])
    planned = json.loads(capsys.readouterr().out)
    for made in (planned, loaded):
        for device in made["devices"]:
            device.pop("name", None)
    assert {"model": "demo"} | loaded == planned
    charged = 64 * MIB - 4 * MIB - planned["devices"][0]["allowance_bytes"]
    assert (charged > 0) == (place != "experts=0")


def test_card_that_is_described_pays_for_runs_as_one_that_is_here(capsys):
    """A card of 32 GiB: what spans of the demo take of a CUDA device is charged."""
    from coli.cli.figures import known_model
    from coli.devices.cuda.device import CudaDevice
    from coli.placing import span_bytes_of

    known = known_model("demo")
    assert 0 == main(["plan", "demo", "--device", "A=32GiB", "--context", "2048", "--json"])
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    beside = sum(whole_layer_bytes(ModelShape.from_config(known_config()), "auto", 2048, 2**31).values())
    taken = 2**35 - default_reserve_bytes(2**35) - device["allowance_bytes"]
    assert beside + span_bytes_of(CudaDevice, known.config, known.kv_dtype) == taken


def known_config():
    """The demo's config.json."""
    from coli.convert.resolve import find_model

    return json.loads((find_model("demo") / "config.json").read_text())
