"""What a plan should have taken, given what is known afterwards: the experts that were chosen, and where they were."""

from __future__ import annotations

from collections.abc import Sequence

from coli.placement.cost import CostModel, Prediction
from coli.placement.plan import Plan
from coli.placement.price import Expert
from coli.placement.speeds import Probe, speeds_of


def predict_seen(
    made: Plan,
    probe: Probe,
    *,
    chosen: Sequence[Sequence[float]],
    resident: Sequence[Sequence[int]],
    position: float,
) -> Prediction:
    """The time of a token of a plan, as the cost model has it.

    chosen : [layer][expert], how often a token chose it.   resident : [layer][expert] -> device, -1 for none.
    position : how far a token looked back.
    """
    experts = [
        Expert(min(max(chosen[layer][index], 0.0), 1.0), layer, index)
        for layer in made.shape.expert_layers
        for index in range(made.shape.n_experts)
    ]
    model = CostModel(made.shape, speeds_of(made.devices, None, probe), experts, position=position)
    return model.predict(made.device_of, [resident[expert.layer][expert.index] for expert in experts])
