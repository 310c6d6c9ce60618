"""coli.placement.homes: where experts are at home."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coli.placement.homes import ON_CPU, homes_of, owners_by_room, slots_of
from coli.placement.price import rank_experts
from placement.examples import LAW, shape


@LAW
@given(n=st.integers(0, 60), slots=st.lists(st.integers(0, 30), max_size=4))
def test_owners_fill_the_slots_with_the_hottest(n, slots):
    """As many of the hottest as there are slots have an owner, and no device more than its slots."""
    owners = owners_by_room(n, slots)
    held = sum(owner != ON_CPU for owner in owners)
    assert min(n, sum(slots)) == held or (n and max(slots) >= n and held == n)
    assert [ON_CPU] * (n - held) == owners[held:]
    assert all(owners.count(i) <= count for i, count in enumerate(slots))


def test_owners_share_the_heat_in_proportion():
    """A device with twice the slots gets two of every three, from the hottest on."""
    assert [0, 0, 1, 0, 0, 1, ON_CPU] == owners_by_room(7, [4, 2])


def test_slots_are_only_where_experts_may_be():
    """A device that may not hold experts has no slots."""
    assert [3, 0, 2] == slots_of([35, 999, 20], 10, (0, 2))
    assert [0] == slots_of([35], 0, (0,))


def test_homes_of_who_is_not_resident_are_where_there_are_slots():
    """Every expert that may be promoted has a home; a device that was left out gets none."""
    ranked = rank_experts(shape(n_experts=10, topk=2, layers=1, expert_layers=1), None)
    owners = [0, 1, 0, 0, 1, 0] + [ON_CPU] * 4
    homes, residents = homes_of(ranked, owners, [4, 2, 7])
    assert [4, 2, 0] == residents
    assert [7, 3, 0] == [len(home) for home in homes]
    assert [0, 2, 3, 5] == [expert.index for expert in homes[0][:4]]
    assert ([[], []], [0, 0]) == homes_of(ranked, [ON_CPU] * 10, [0, 0])
