"""The budget as sums that add up: for each device free, what is held back, what is placed, experts, what is left.

Every row is signed as it enters its sum, so that a device's rows down to its total add up to zero error, and
``check`` in the tests can do the sum that a reader would.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from coli.placement.components import COMPONENTS
from coli.placement.facts import device_label

if TYPE_CHECKING:
    from coli.placement.plan import Plan


@dataclass(frozen=True)
class Row:
    """One line.  ``is_sum``: the total of the lines above it."""

    label: str
    bytes: int
    is_sum: bool = False


@dataclass(frozen=True)
class Column:
    """The lines of one place."""

    title: str
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        lines = [self.title]
        for row in self.rows:
            mark = "=" if row.is_sum else " " if row.bytes >= 0 else "-"
            lines.append(f"  {mark} {row.label:<40} {abs(row.bytes):>18,}  {abs(row.bytes) / (1 << 20):>12,.1f} MiB")
        return "\n".join(lines)


@dataclass(frozen=True)
class BudgetTable:
    """Each device's sum, and what lies on the host."""

    devices: tuple[Column, ...]
    host: Column

    def __str__(self) -> str:
        return "\n".join(str(column) for column in (*self.devices, self.host))


def budget_table(plan: Plan) -> BudgetTable:
    """The table of a plan."""
    return BudgetTable(tuple(_device(plan, i) for i in range(len(plan.devices))), _host(plan))


def _device(plan: Plan, index: int) -> Column:
    facts = plan.devices[index]
    rows = [Row("free", facts.free_bytes)]
    left = facts.free_bytes
    # A reserve larger than what is free holds back what there is.
    for label, held in (
        ("reserve", facts.reserve_bytes),
        ("runtime context", facts.runtime_bytes),
        ("staging", facts.staging_bytes),
        ("state and scratch of layers", facts.layer_bytes),
    ):
        taken = min(held, left)
        left -= taken
        if taken or label == "reserve":
            rows.append(Row(label, -taken))
    rows.append(Row("allowance", left, True))
    for name in COMPONENTS:
        sizes = [d.bytes for d in plan.decisions if d.component == name and d.device == index]
        if sizes:
            rows.append(Row(f"{name} x {len(sizes)}", -sum(sizes)))
    rows.append(Row("experts' budget", plan.budgets[index], True))
    residents = plan.residents[index]
    experts_bytes = residents * plan.shape.expert_bytes
    rows.append(Row(f"{residents:,} of {plan.shape.expert_count:,} experts", -experts_bytes))
    rows.append(Row("left", plan.budgets[index] - experts_bytes, True))
    return Column(f"device {device_label(index, facts)}", tuple(rows))


def _host(plan: Plan) -> Column:
    shape = plan.shape
    rows = []
    for name in COMPONENTS:
        sizes = [d.bytes for d in plan.decisions if d.component == name and d.device is None]
        if sizes:
            rows.append(Row(f"{name} x {len(sizes)}", sum(sizes)))
    # The container is mapped whole: an expert in VRAM keeps its bytes in the file, and is not read from there.
    missing = shape.expert_count - sum(plan.residents)
    rows.append(Row(f"{missing:,} of {shape.expert_count:,} experts", missing * shape.expert_bytes))
    if shape.fixed_bytes:
        rows.append(Row("embedding, routers, norms", shape.fixed_bytes))
    rows.append(Row(f"keys and values, {plan.context:,} positions", shape.kv_bytes(plan.context)))
    rows.append(Row("recurrent state, one sequence", shape.state_bytes))
    rows.append(Row("on the host", sum(row.bytes for row in rows), True))
    return Column("host", tuple(rows))
