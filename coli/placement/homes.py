"""Which device each expert is at home on, and who is resident there.

An expert has one home: there is never a second copy.  Resident or not, the CPU can always compute it.  An ``Owners``
names, for each expert in heat order, the device it is resident on; homes of the others follow from it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from coli.placement.price import Expert, deal

# For each expert, hottest first: the device it is resident on, or ON_CPU.
Owners = list[int]
ON_CPU = -1

# How experts are dealt to devices: in proportion to their slots; so that all are done at the same time; or so, but
# none to a device that would then take longer than the CPU with the others; or to the card that takes their layer
# whole, which then need not ask for them.
BY_ROOM, BY_SPEED, BESIDE_CPU, WITH_LAYER = "by room", "by speed", "beside the CPU", "with their layers"
DEALINGS = (BY_ROOM, BY_SPEED, BESIDE_CPU, WITH_LAYER)


def slots_of(budgets: Sequence[int], slot_bytes: int, allowed: Collection[int]) -> list[int]:
    """Expert slots of each device; none on a device that may not hold experts."""
    return [budget // slot_bytes if i in allowed and slot_bytes else 0 for i, budget in enumerate(budgets)]


def owners_by_room(n_experts: int, slots: Sequence[int]) -> Owners:
    """The hottest that there is room for, dealt in proportion to the slots: each device gets its share of every heat.

    Where one device can hold all, it does: a second one would only add a round trip to every layer.
    """
    roomiest = max(range(len(slots)), key=lambda i: (slots[i], -i), default=None)
    if roomiest is None or not slots[roomiest]:
        return [ON_CPU] * n_experts
    if slots[roomiest] >= n_experts:
        return [roomiest] * n_experts
    total = sum(slots)
    return (deal(slots, min(total, n_experts)) + [ON_CPU] * n_experts)[:n_experts]


def homes_of(
    ranked: Sequence[Expert], owners: Owners, slots: Sequence[int], beside: Mapping[int, int] | None = None
) -> tuple[list[list[Expert]], list[int]]:
    """The experts at home on each device, residents first and each part hottest first, and how many are resident.

    Who is not resident is at home in proportion to the slots, so that it can be promoted later.
    beside : layer -> the device that its experts are at home on instead, where it holds any.
    """
    homes: list[list[Expert]] = [[] for _ in slots]
    waiting: list[Expert] = []
    for expert, owner in zip(ranked, owners, strict=True):
        (waiting if owner == ON_CPU else homes[owner]).append(expert)
    residents = [len(home) for home in homes]
    # A device that holds none though it could was left out on purpose.
    weights = [count if resident else 0 for count, resident in zip(slots, residents, strict=True)]
    if any(weights):
        kept = {layer: device for layer, device in (beside or {}).items() if weights[device]}
        for expert in waiting:
            if expert.layer in kept:
                homes[kept[expert.layer]].append(expert)
        others = [expert for expert in waiting if expert.layer not in kept]
        for expert, device in zip(others, deal(weights, len(others)), strict=True):
            homes[device].append(expert)
    return homes, residents
