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
    residents: Sequence[Sequence[Sequence[int]]],
    position: float,
) -> Prediction:
    """The time of a token of a plan, as the cost model has it.

    chosen : [layer][expert], how often a token chose it; nothing but zeros where nobody counted, since no device has
        room for an expert: then one is as likely as another.
    residents : [layer][expert] -> device, -1 for none, at one time or at several: experts change places meanwhile, and
        the mean of the predictions counts.
    position : how far a token looked back.
    """
    even = made.shape.topk / made.shape.n_experts if made.shape.n_experts else 0.0
    experts = []
    for layer in made.shape.expert_layers:
        counted = any(chosen[layer])
        experts += [
            Expert(min(max(chosen[layer][index], 0.0), 1.0) if counted else even, layer, index)
            for index in range(made.shape.n_experts)
        ]
    model = CostModel(made.shape, speeds_of(made.devices, None, probe), experts, position=position)
    found = [
        model.predict(made.device_of, [resident[expert.layer][expert.index] for expert in experts]).us
        for resident in residents
    ]
    return Prediction({part: sum(us.get(part, 0.0) for us in found) / len(found) for part in found[0]})
