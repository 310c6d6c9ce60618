"""Which matrix lies on which device, and why: pure functions of facts.

    components, geometry, sizes    what can be moved, and its bytes
    facts, speeds                  what is known of the machine
    grammar                        COLI_PLACE
    price, bytesauto               bytes saved a token, and the placement that saves most
    cost                           the time of a token
    hindsight                      the same, knowing which experts were chosen
    slowest                        who of several is done last
    timeauto                       the placement that takes least: timecandidate (what is compared), timesearch (on the
                                   average layer of timelayer), timepolish (layer by layer)
    homes                          which device an expert is at home on
    streaming                      which missing experts of a prompt a device computes in passing
    fixed, plan                    lists and off; the plan
    table, report                  the sums, the lines

No file is opened and no device is asked here, and of coli only ``coli.errors`` is imported.
"""

from coli.errors import PlacementError
from coli.placement.components import Component, ModelShape
from coli.placement.decision import Decision
from coli.placement.facts import CpuFacts, DeviceFacts, default_reserve_bytes, device_label
from coli.placement.grammar import PlaceItem, PlaceList, Segment, parse
from coli.placement.hindsight import predict_seen
from coli.placement.plan import Alternative, Plan, plan
from coli.placement.report import place_lines
from coli.placement.speeds import CpuSpeeds, Probe, SpanSpeed, Speed, Speeds, speeds_from_dict
from coli.placement.table import BudgetTable, budget_table
from coli.placement.whole import with_whole_layers

__all__ = [
    "Alternative",
    "BudgetTable",
    "Component",
    "CpuFacts",
    "CpuSpeeds",
    "Decision",
    "DeviceFacts",
    "ModelShape",
    "PlaceItem",
    "PlaceList",
    "PlacementError",
    "Plan",
    "Probe",
    "Segment",
    "SpanSpeed",
    "Speed",
    "Speeds",
    "budget_table",
    "default_reserve_bytes",
    "device_label",
    "parse",
    "place_lines",
    "plan",
    "predict_seen",
    "speeds_from_dict",
    "with_whole_layers",
]
