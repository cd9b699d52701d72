"""Host time of Megatron's and nanotron's Python around blocks and chunks, beyond modules and launches."""

from __future__ import annotations

from zsim.plan.builder import PlanBuilder
from zsim.plan.workload.workload import ModuleCall, Segment
from zsim.specs.model.experts import GroupedLinear, Router
from zsim.specs.model.works import Attention, Exchange, Linear, Norm
from zsim.specs.strategy.megatron import Megatron
from zsim.specs.strategy.parallelism import Parallelism

_GROWTH = 1.25  # of nanotron's wait with its tensor ranks, fitted beside `nanotron_pipelined_rank`


def enter_block(
    builder: PlanBuilder, strategy: Megatron, split: Parallelism, segment: Segment, passes: int
) -> None:
    """Host time of a block, beyond modules and launches.

    It forks and restores random states and runs products as autograd functions in Python. Attention without a
    fused kernel costs time, and so do each hop of its ring (`AttnFuncWithCPAndKVP2P` of Transformer Engine)
    and the switches to another micro-batch between the parts of a layer (`TransformerLayerSchedulePlan` of
    core 0.16.1 models/common/model_chunk_schedule_plan.py). Norms that are modules of their own and products
    beyond a dense layer's are counted one by one. Under a pipeline nanotron also waits for the ranks of its
    tensor parallelism.
    """
    overhead = strategy.block_overhead
    if overhead is None or segment.kind != "block":
        return
    builder.host(f"enter {segment.name}", overhead=overhead, events=passes)
    for beside in (strategy.attention_overhead, strategy.pairing_overhead):
        if beside is not None:
            builder.host(f"enter {segment.name}", overhead=beside, events=passes)
    if any(strategy.norm_overheads):
        events = (*strategy.norm_overheads, *strategy.linear_overheads)
        counts = (*norms_alone(segment), *more_products(segment))
        for beside, count in zip(events, counts, strict=True):
            if beside is not None and count:
                builder.host(f"enter {segment.name}", overhead=beside, events=passes * count)
    hops = split.ring_hops if split.style == "megatron" else 1
    if hops > 1:
        builder.host(f"enter {segment.name}", overhead="megatron_core_hop", events=passes * hops)
    if split.style == "nanotron" and split.pipeline > 1 and split.tensor > 1:
        waits = round(passes * split.tensor**_GROWTH)
        builder.host(f"enter {segment.name}", overhead="nanotron_pipelined_rank", events=waits)


def norms_alone(segment: Segment) -> tuple[int, int]:
    """Norms of a block that Transformer Engine's layers do not fuse into the product that follows: those of
    its attention, and the one that a router reads.

    core 0.16.1 models/gpt/gpt_layer_specs.py: `TELayerNormColumnParallelLinear` has the norm before
    linear_qkv, before a dense linear_fc1 and before the second products of latent attention. `TENorm` is that
    of queries and keys, of a layer of experts, and the first with latent attention.
    """
    works = [call.module.work for call in segment.calls if not isinstance(call.module.work, Exchange)]
    places = [place for place, work in enumerate(works) if isinstance(work, Norm)]
    router = max((place for place, work in enumerate(works) if isinstance(work, Router)), default=-1)
    routed = [place for place in places if place < router][-1:]
    is_latent = any(isinstance(work, Attention) and work.is_latent for work in works)
    fused = [one for one, behind in enumerate(works[1:]) if isinstance(behind, Linear)]
    alone = [
        place
        for place in places
        if place not in routed and (place not in fused or (is_latent and place == places[0]))
    ]
    return len(alone), len(routed)


def more_products(segment: Segment) -> tuple[int, int]:
    """Dense products of a block beyond those of a dense layer, whose attention has two and whose MLP two: of
    attention (latent attention has four or five), and of shared experts, for routed experts' products stand
    in for the MLP's."""
    works = [call.module.work for call in segment.calls if ".lora_" not in call.name]
    attention = max((place for place, work in enumerate(works) if isinstance(work, Attention)), default=-1)
    linears = [place for place, work in enumerate(works) if isinstance(work, Linear)]
    before = sum(place < attention for place in linears)
    behind = len(linears) - before
    if attention < 0:
        return 0, 0
    routed = any(isinstance(work, Router) for work in works)
    return max(before - 1, 0), max(behind - 1 - (0 if routed else 2), 0)


def enter_chunk(builder: PlanBuilder, strategy: Megatron, split: Parallelism) -> None:
    """Host time of a forward or backward of one of several chunks: the interleaved schedule's own Python.
    Where timers wait for every message it is not seen (see `megatron_chunk`)."""
    is_paid = strategy.block_overhead is not None and not strategy.synchronizes
    if is_paid and split.style == "megatron" and split.virtual_stages > 1:
        builder.host("enter chunk", overhead="megatron_chunk")


def enter_experts(builder: PlanBuilder, strategy: Megatron, call: ModuleCall) -> None:
    """Host time of routed experts.

    Where one product computes all experts it is the time of routing, dispatch and return, in forward and in
    backward, before the router and before each of the two products. Where experts run one after the other
    (core/transformer/moe/experts.py `SequentialMLP`) it is the time of each expert's modules, half before
    each product of forward. See `megatron_core_experts` and `megatron_core_expert` of
    presets/frameworks.toml.
    """
    work = call.module.work
    if not isinstance(work, Router | GroupedLinear) or ".lora_" in call.name:
        return
    overhead = strategy.expert_overheads[isinstance(work, GroupedLinear)]
    if overhead is not None:
        builder.host(f"enter {call.name}", overhead=overhead)
    is_forward = builder.phase in ("forward", "recompute")
    if strategy.product_overhead is not None and isinstance(work, GroupedLinear) and work.kernel == "streams":
        products = (work.num_experts - 1) * (1 if is_forward else 2)
        if products:
            builder.host(f"enter {call.name}", overhead=strategy.product_overhead, events=products)
    if is_forward and strategy.one_expert_overhead is not None and isinstance(work, GroupedLinear):
        builder.host(f"enter {call.name}", overhead=strategy.one_expert_overhead, events=work.num_experts)


def run_fsdp_hooks(builder: PlanBuilder, segment: Segment, *, is_backward: bool) -> None:
    """Host time of Megatron-FSDP's hooks of a layer in one pass, beyond collectives and launches: those of
    the layer, those before its modules that have parameters in forward, and those after the gradients of its
    parameters in backward. Routed experts have a parameter each for each of their products.
    """
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
