"""Host time of Megatron's and nanotron's Python around blocks and chunks, beyond modules and launches."""

from __future__ import annotations

from zsim.frameworks.megatron.parallelism import MEGATRON, NANOTRON
from zsim.frameworks.megatron.settings.config import MegatronConfig
from zsim.frameworks.megatron.settings.experts import FUSED_DISPATCH, ROUTING
from zsim.operations.grouped_linear import GroupedLinear
from zsim.operations.operation import Role
from zsim.plan.builder import PlanBuilder
from zsim.plan.workload.workload import ModuleCall, Segment
from zsim.specs.strategy.experts import DEDUPLICATING_DISPATCHERS
from zsim.specs.strategy.parallelism import ParallelismConfig

_TENSOR_RANK_EXPONENT = (
    1.25  # of nanotron's wait with its tensor ranks, fitted beside `nanotron_pipelined_rank`
)


def enter_block(
    builder: PlanBuilder,
    strategy: MegatronConfig,
    parallelism: ParallelismConfig,
    segment: Segment,
    passes: int,
) -> None:
    """Host time of a block, beyond modules and launches.

    It forks and restores random states and runs products as autograd functions in Python. Attention without a
    fused kernel costs time, and so do each hop of its ring (`AttnFuncWithCPAndKVP2P` of Transformer Engine)
    and the switches to another micro-batch between the parts of a layer (`TransformerLayerSchedulePlan` of
    core 0.16.1 models/common/model_chunk_schedule_plan.py). Norms that are modules of their own and products
    beyond a dense layer's are counted one by one. Under a pipeline nanotron also waits for the ranks of its
    tensor parallelism.
    """
    host_events = strategy.host_events
    overhead = host_events.block
    if overhead is None or segment.kind != "block":
        return
    builder.host(f"enter {segment.name}", overhead=overhead, events=passes)
    for extra_overhead in (host_events.attention, host_events.pairing):
        if extra_overhead is not None:
            builder.host(f"enter {segment.name}", overhead=extra_overhead, events=passes)
    if any(host_events.norms):
        item_overheads = (*host_events.norms, *host_events.linears)
        counts = (*unfused_norms(segment), *extra_products(segment))
        for extra_overhead, count in zip(item_overheads, counts, strict=True):
            if extra_overhead is not None and count:
                builder.host(f"enter {segment.name}", overhead=extra_overhead, events=passes * count)
    hops = parallelism.ring_hops if parallelism.style == MEGATRON else 1
    if hops > 1:
        builder.host(f"enter {segment.name}", overhead="megatron_core_hop", events=passes * hops)
    if parallelism.style == NANOTRON and parallelism.pipeline > 1 and parallelism.tensor > 1:
        waits = round(passes * parallelism.tensor**_TENSOR_RANK_EXPONENT)
        builder.host(f"enter {segment.name}", overhead="nanotron_pipelined_rank", events=waits)


def unfused_norms(segment: Segment) -> tuple[int, int]:
    """Norms of a block that Transformer Engine's layers do not fuse into the product that follows: those of
    its attention, and the one that a router reads.

    core 0.16.1 models/gpt/gpt_layer_specs.py: `TELayerNormColumnParallelLinear` has the norm before
    linear_qkv, before a dense linear_fc1 and before the second products of latent attention. `TENorm` is that
    of queries and keys, of a layer of experts, and the first with latent attention.
    """
    modules = [call.module for call in segment.calls if call.module.role is not Role.EXCHANGE]
    norm_indices = [index for index, module in enumerate(modules) if module.role is Role.NORM]
    router = max((index for index, module in enumerate(modules) if module.role is Role.ROUTER), default=-1)
    router_norms = [index for index in norm_indices if index < router][-1:]
    is_latent = any(module.op_spec.is_latent for module in modules)
    fused_indices = [
        index for index, next_module in enumerate(modules[1:]) if next_module.role is Role.PRODUCT
    ]
    unfused = [
        index
        for index in norm_indices
        if index not in router_norms
        and (index not in fused_indices or (is_latent and index == norm_indices[0]))
    ]
    return len(unfused), len(router_norms)


def extra_products(segment: Segment) -> tuple[int, int]:
    """Dense products of a block beyond those of a dense layer, whose attention has two and whose MLP two: of
    attention (latent attention has four or five), and of shared experts, for routed experts' products stand
    in for the MLP's."""
    modules = [call.module for call in segment.calls if ".lora_" not in call.name]
    attention = max((index for index, module in enumerate(modules) if module.role is Role.MIXER), default=-1)
    product_indices = [index for index, module in enumerate(modules) if module.role is Role.PRODUCT]
    attention_products = sum(index < attention for index in product_indices)
    mlp_products = len(product_indices) - attention_products
    if attention < 0:
        return 0, 0
    is_routed = any(module.role is Role.ROUTER for module in modules)
    return max(attention_products - 1, 0), max(mlp_products - 1 - (0 if is_routed else 2), 0)


def enter_chunk(builder: PlanBuilder, strategy: MegatronConfig, parallelism: ParallelismConfig) -> None:
    """Host time of a forward or backward of one of several chunks: the interleaved schedule's own Python.
    Where timers wait for every message it is not seen (see `megatron_chunk`)."""
    has_overhead = strategy.host_events.block is not None and not strategy.synchronizes_timers
    if has_overhead and parallelism.style == MEGATRON and parallelism.virtual_stages > 1:
        builder.host("enter chunk", overhead="megatron_chunk")


def enter_experts(
    builder: PlanBuilder, strategy: MegatronConfig, parallelism: ParallelismConfig, call: ModuleCall
) -> None:
    """Host time of routed experts.

    Where one product computes all experts it is the time of routing, dispatch and return, in forward and in
    backward, before the router and before each of the two products. DeepEP and HybridEP dispatch and return
    tokens in a few kernels. Where experts run one after the other
    (core/transformer/moe/experts.py `SequentialMLP`) it is the time of each expert's modules, half before
    each product of forward. See `megatron_core_experts` and `megatron_core_expert` of
    presets/frameworks.toml.
    """
    work = call.module.op_spec
    if call.module.role not in (Role.ROUTER, Role.EXPERT_PRODUCT) or ".lora_" in call.name:
        return
    is_product = call.module.role is Role.EXPERT_PRODUCT
    host_events = strategy.host_events
    overhead = host_events.experts[is_product]
    if is_product and overhead == ROUTING and parallelism.experts.dispatcher in DEDUPLICATING_DISPATCHERS:
        overhead = FUSED_DISPATCH
    if overhead is not None:
        builder.host(f"enter {call.name}", overhead=overhead)
    is_forward = builder.phase in ("forward", "reference", "recompute")
    if host_events.product is not None and isinstance(work, GroupedLinear) and work.kernel == "streams":
        products = (work.num_experts - 1) * (1 if is_forward else 2)
        if products:
            builder.host(f"enter {call.name}", overhead=host_events.product, events=products)
    if is_forward and host_events.local_expert is not None and isinstance(work, GroupedLinear):
        builder.host(f"enter {call.name}", overhead=host_events.local_expert, events=work.num_experts)


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
        tensors = [call.module.op_spec.num_weights * len(call.trainable_parameters) for call in owners]
        name, events = "megatron_fsdp_gradient", sum(tensors)
    else:
        name, events = "megatron_fsdp_module", len(owners)
    if events:
        builder.host(f"hooks of {segment.name}", overhead=name, events=events)
