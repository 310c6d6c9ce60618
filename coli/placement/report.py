"""The ``[place]`` lines: one a verdict, with the numbers that made it and what it beat.

Verdicts that differ only in their layer share a line.  Text only; the same records as ``Plan.decisions``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from coli.placement import decision as why
from coli.placement.decision import Decision
from coli.placement.facts import device_label
from coli.placement.plan import Alternative, Plan

_MIB = 1 << 20


def place_lines(plan: Plan, *, each: bool = False) -> list[str]:
    """The lines of a plan, without their tag.

    each : one line for every component, instead of one for those that share a verdict.
    """
    lines = [_headline(plan)]
    if each:
        lines += [f"looked at: {other.label}{_left_out(plan, other)} {_speed(other.ms_per_token)}"
                  for other in plan.alternatives if other.ms_per_token is not None]  # fmt: skip
    lines += [_verdict(plan, group) for group in _groups(plan.decisions, each)]
    lines += list(_experts(plan))
    lines.append(_bytes_per_token(plan))
    if plan.predicted_ms_per_token is not None:
        ms = plan.predicted_ms_per_token
        lines.append(f"predicted {ms:.2f} ms/token, {1e3 / ms:.1f} tok/s")
    return lines


def _headline(plan: Plan) -> str:
    """What was asked for, what was chosen and what that beat."""
    if not plan.alternatives:
        return f"{plan.place}: obeyed as written" if plan.label == "list" else plan.place
    if not plan.devices:
        return f"{plan.place}: there is no device"
    chosen, *others = plan.alternatives
    if chosen.ms_per_token is None:
        rivals = "".join(f"; {other.label} {other.saved_bytes / 1e6:,.1f}" for other in others)
        return f"{plan.place}: {chosen.label} saves {chosen.saved_bytes / 1e6:,.1f} MB/token{rivals}"
    if plan.label in ("list", "off") and not plan.place.startswith("auto"):
        (auto,) = others
        return (
            f"{plan.place}: {chosen.ms_per_token:.2f} ms/token, obeyed; {auto.label} would take {auto.ms_per_token:.2f}"
        )
    # The nearest, the best with fewer cards (what the split gains), and those that everyone asks about.
    fewer = next((other for other in others if len(other.devices) < len(chosen.devices)), None)
    others = [o for i, o in enumerate(others) if i == 0 or o is fewer or o.label in ("off", "bytes")]
    rivals = "".join(f"; {other.label} {_speed(other.ms_per_token)}" for other in others)
    return f"{plan.place}: {chosen.label} takes {_speed(chosen.ms_per_token)}{rivals}"


def _speed(ms_per_token: float) -> str:
    return f"{ms_per_token:.2f} ms/token ({1e3 / ms_per_token:.1f} tok/s)"


def _left_out(plan: Plan, other: Alternative) -> str:
    """Which cards an alternative makes no use of, where it makes use of any."""
    idle = [str(i) for i in range(len(plan.devices)) if i not in other.devices]
    return f", {'+'.join(idle)} left out" if idle and other.devices else ""


def _groups(decisions: Iterable[Decision], each: bool) -> Iterator[list[Decision]]:
    """Verdicts by component, then by what was decided, in the order of the offers."""
    if each:
        yield from ([made] for made in decisions)
        return
    for _, same_name in groupby(decisions, key=lambda made: made.component):
        groups: dict[tuple, list[Decision]] = {}
        for made in same_name:
            groups.setdefault((made.device, made.asked, made.reason), []).append(made)
        yield from groups.values()


def _verdict(plan: Plan, group: Sequence[Decision]) -> str:
    first, last = group[0], group[-1]
    n_bytes = sum(made.bytes for made in group)
    name = first.component if first.layer is None else f"{first.component} {_layers([made.layer for made in group])}"
    size = f"{n_bytes / _MIB:,.1f} MiB"
    experts = _price(group)
    if first.device is not None:
        where = device_label(first.device, plan.devices[first.device])
        value = "as listed" if first.reason == why.LISTED else f"value 1.0000/B > {experts}"
        if first.cpu_us is not None:
            value = f"alone {_sum_ms(group, 'device_us')} ms < {_sum_ms(group, 'cpu_us')} ms on the cpu"
        room = f"room {first.room_before / _MIB:,.1f} -> {last.room_after / _MIB:,.1f} MiB"
        return f"{name} -> {where}  {size}  {value}  {room}"
    return f"{name} -> cpu  {size}  {_why_not(plan, group, experts)}"


def _sum_ms(group: Sequence[Decision], field: str) -> str:
    return f"{sum(getattr(made, field) or 0.0 for made in group) / 1e3:.3f}"


def _price(group: Sequence[Decision]) -> str:
    n_bytes = sum(made.bytes for made in group)
    per_byte = sum(made.experts_per_byte * made.bytes for made in group) / n_bytes
    displaced = sum(made.displaced for made in group)
    experts = f"the {displaced:,} coldest experts" if displaced else "part of an expert"
    return f"{per_byte:.4f}/B ({experts if per_byte else 'room no expert would use'})"


def _why_not(plan: Plan, group: Sequence[Decision], experts: str) -> str:
    made = group[0]
    times = f"alone {_sum_ms(group, 'cpu_us')} ms, {_sum_ms(group, 'device_us')} ms"
    asked = None if made.asked is None else device_label(made.asked, plan.devices[made.asked])
    return {
        why.NO_ROOM: f"does not fit: room {made.room_before / _MIB:,.1f} MiB on {asked}, the roomiest",
        why.EXPERTS_WORTH_MORE: f"value 1.0000/B < {experts} on {asked}",
        why.WITHHELD: f"withheld: the plan saves more without any {made.component}",
        why.SLOWER: f"the cpu is faster: {times} on {asked}",
        why.NO_GAIN: f"no token would be faster: {times} on {asked}",
        why.LISTED: "as listed",
        why.NOT_LISTED: "the list does not name it",
        why.OFF: "nothing is placed",
        why.NO_DEVICE: "there is no device",
    }[made.reason]


def _experts(plan: Plan) -> Iterator[str]:
    for i, device in enumerate(plan.devices):
        label = device_label(i, device)
        if not plan.residents[i]:
            yield f"experts -> none on {label}  {plan.budgets[i] / _MIB:,.1f} MiB stay free: {_why_none(plan, i)}"
            continue
        yield (
            f"experts -> {label}  {plan.residents[i]:,} of {plan.shape.expert_count:,}  "
            f"{plan.residents[i] * plan.shape.expert_bytes / _MIB:,.1f} of {plan.budgets[i] / _MIB:,.1f} MiB  "
            f"{plan.hits[i]:.1f} hits/token"
        )


def _why_none(plan: Plan, device: int) -> str:
    if plan.slots[device]:
        return "all experts fit elsewhere"
    if device in plan.expert_devices:
        return f"an expert takes {plan.shape.expert_bytes / _MIB:,.1f} MiB"
    if plan.label == "list":
        return "as listed"
    if plan.placed_bytes[device]:
        return "no token would be faster with experts there"
    return "left out, as no token would be faster with anything on it"


def _bytes_per_token(plan: Plan) -> str:
    sides = [f"cpu {plan.cpu_bytes_per_token / 1e6:,.1f} MB"]
    sides += [f"device {i} {n_bytes / 1e6:,.1f} MB" for i, n_bytes in enumerate(plan.device_bytes_per_token)]
    return f"bytes/token: {', '.join(sides)}"


def _layers(layers: Sequence[int]) -> str:
    """``0-2,4-6``: runs of consecutive layers."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ",".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
