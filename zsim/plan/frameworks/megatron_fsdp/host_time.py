"""Host time of Megatron-FSDP's Python around a layer, beyond its collectives and launches."""

from __future__ import annotations

from zsim.plan.builder import PlanBuilder
from zsim.plan.workload.workload import Segment
from zsim.specs.model.experts import GroupedLinear


def pass_unit(builder: PlanBuilder, segment: Segment, *, is_backward: bool) -> None:
    """Host time of the hooks of a layer in one pass: its own, those in front of its modules that have
    parameters in forward, those behind the gradients of its parameters in backward. Routed experts have a
    parameter each for each of their products."""
    if segment.kind != "block":
        return
    builder.host(f"hooks of {segment.name}", overhead="megatron_fsdp_unit")
    owners = [call for call in segment.calls if call.parameters]
    if is_backward:
        tensors = [
            (call.module.work.num_experts if isinstance(call.module.work, GroupedLinear) else 1)
            * len(call.trainable_parameters)
            for call in owners
        ]
        name, events = "megatron_fsdp_gradient", sum(tensors)
    else:
        name, events = "megatron_fsdp_module", len(owners)
    if events:
        builder.host(f"hooks of {segment.name}", overhead=name, events=events)
