"""coli.placement.report: the [place] lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from coli.placement import CpuFacts, DeviceFacts, ModelShape, Plan, place_lines, plan
from placement.examples import MIB, QWEN36_35B, cards, shape, skewed_heat

GOLDEN = Path(__file__).parent / "place_lines.txt"

RTX = DeviceFacts(
    "RTX 3070",
    int(7.5 * 2**30),
    reserve_bytes=512 * MIB,
    uuid="GPU-1f2e3d4c-5b6a-7988-a7b6-c5d4e3f2a1b0",
    gb_s=448,
    latency_us=12,
)
QUADRO = DeviceFacts("Quadro", 3 << 30, reserve_bytes=192 * MIB, pci_bus_id="0000:65:00.0", gb_s=416, latency_us=15)


def plans() -> dict[str, Plan]:
    """One plan of each kind."""
    model = ModelShape.from_config(QWEN36_35B)
    heat = skewed_heat(40, 256, 11, 0.8)
    listed = "lmhead=0,dnproj=0:20+1:20,experts=0"
    tight = shape(50, 2, 8, n_experts=100, topk=100, expert_layers=1)
    return {
        "auto in bytes, two cards, heat": plan(model, [RTX, QUADRO], heat=heat),
        "auto in bytes, one card too small for all": plan(model, [QUADRO]),
        "auto in bytes, lmhead withheld": plan(tight, cards(125)),
        "auto in bytes, hot experts": plan(shape(4, 0.5, 6, n_experts=48, topk=32, expert_layers=1), cards(16)),
        "auto in time, two cards": plan(model, [RTX, QUADRO], heat=heat, cpu=CpuFacts(40)),
        "auto in time, a slow card": plan(
            model, [DeviceFacts("M10", 24 << 30, gb_s=13, latency_us=30)], cpu=CpuFacts(40)
        ),
        "a list": plan(model, [RTX, QUADRO], place=listed),
        "a list, with speeds": plan(model, [RTX, QUADRO], place=listed, cpu=CpuFacts(40)),
        "off": plan(model, [RTX], place="off"),
        "no device": plan(model, []),
    }


def text_of(all_plans: dict[str, Plan]) -> str:
    """The lines of all plans under their names."""
    return "\n".join("\n".join([f"# {name}", *place_lines(made), ""]) for name, made in all_plans.items())


def test_place_lines_are_the_recorded_ones():
    """The lines' keys are stable.

    After a change that is meant, PYTHONPATH=tests python tests/placement/test_report.py records anew.
    """
    assert GOLDEN.read_text().splitlines() == text_of(plans()).splitlines()


@pytest.mark.parametrize("each", [False, True])
def test_place_lines_name_every_component_once_with_its_device(each):
    """One line a verdict: each component is in exactly one, which ends up where place_of says."""
    made = plan(shape(10, 9, 6), cards(64, 64))
    lines = place_lines(made, each=each)
    for layer in range(6):
        if each:
            (line,) = (line for line in lines if line.startswith(f"dnproj {layer} "))
            assert f"-> {made.place_of('dnproj', layer)} (card" in line
    assert {"dnproj 0-1,3,5 -> 1 (card 1)", "dnproj 2,4 -> 0 (card 0)"} <= {
        line.partition("  ")[0] for line in lines
    } or each
    assert all("\n" not in line for line in lines)


def test_place_lines_verbose_show_every_alternative_with_its_speed():
    """coli plan -v shows what was looked at, with predicted tok/s."""
    made = plan(ModelShape.from_config(QWEN36_35B), [RTX, QUADRO], cpu=CpuFacts(40))
    looked_at = [line for line in place_lines(made, each=True) if line.startswith("looked at: ")]
    assert len(made.alternatives) == len(looked_at) > 10
    assert all("tok/s" in line for line in looked_at)


if __name__ == "__main__":
    GOLDEN.write_text(text_of(plans()))
