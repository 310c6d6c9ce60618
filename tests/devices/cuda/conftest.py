"""What tests of single kernels share: a card, real or emulated, for a module; emptied behind every test."""

from __future__ import annotations

import pytest
from devices.cuda.cards import Card
from devices.cuda.machines import MACHINES, machine


@pytest.fixture(scope="module", params=MACHINES)
def shared_card(request):
    with machine(request.param):
        card = Card()
        yield card
        card.clear()
        card.context.close()


@pytest.fixture
def card(shared_card):
    yield shared_card
    shared_card.clear()
