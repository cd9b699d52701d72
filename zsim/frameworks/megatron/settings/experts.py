"""Megatron's layers and routed experts: their cost to the host, and the checks of overlapped exchanges.

Read in Megatron-LM d98e8a64: `TransformerConfig.__post_init__` of
megatron/core/transformer/transformer_config.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.megatron.settings.table import MegatronTable
from zsim.specs.model.expert_layer import has_experts, shared_modules
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.experts import DEDUPLICATING_DISPATCHERS, ExpertSplit
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.training import TrainingConfig

_KEY = "strategy.overlap_expert_parallel"
ROUTING = "megatron_core_routing"
"""The event of routing, and of dispatch or return by operators of torch."""
FUSED_DISPATCH = "megatron_core_fused_dispatch"
"""The event of dispatch or return by DeepEP's and HybridEP's few kernels, or after a graph."""


@dataclass(frozen=True, slots=True)
class HostEvents:
    """The events of presets/frameworks.toml that say what the Python of layers costs the host. What runs in a
    CUDA graph has none.
    """

    block: str | None = "megatron_core_block"
    """Of one pass through a block. Half of it where a graph has its attention or its dense MLP."""
    experts: tuple[str | None, str | None] = (None, None)
    """Of a layer's router and of each of its two grouped products."""
    local_expert: str | None = None
    """Of one local expert in each of its two products, where experts run one after the other."""
    product: str | None = None
    """Of each of an expert's products beyond the first's, where Transformer Engine launches one for each."""
    norms: tuple[str | None, str | None] = (None, None)
    """Of Transformer Engine's norms that are modules of their own, in attention and before a router."""
    linears: tuple[str | None, str | None] = (None, None)
    """Of its products beyond the four that a block is fitted with, in attention and in shared experts."""
    attention: str | None = None
    """Of Transformer Engine's attention without a fused kernel, in addition to a block's."""
    pairing: str | None = None
    """Of a layer that is split under `overlap_expert_parallel`, in addition to a block's."""


def host_events(table: MegatronTable, training: TrainingConfig, has_core: bool) -> HostEvents:
    """The events of an engine, and those of Megatron-Core's modules where `has_core`.

    With a graph of `moe_preprocess` the operators before an all-to-all are in it, and a graph of the router
    has shared experts, too.
    """
    if table.cuda_graph or table.engine == "internevo":
        return HostEvents(block=None)
    if table.engine == "nanotron" or not has_core:
        return HostEvents(f"{table.engine}_block")
    graphs = set(table.cuda_graph_modules)
    name = "megatron_core_deterministic" if table.deterministic_mode else "megatron_core"
    router = "megatron_core_experts" if table.deterministic_mode else ROUTING
    dispatch = FUSED_DISPATCH if router == ROUTING and "moe_preprocess" in graphs else router
    has_attention, has_router = "attn" not in graphs, "moe_router" not in graphs
    is_grouped, has_engine = table.moe_grouped_gemm, table.runs_transformer_engine

    def event_pair(event: str) -> tuple[str | None, str | None]:
        attention = event if has_engine and has_attention else None
        return attention, event if has_engine and has_router else None

    return HostEvents(
        block=(f"{name}_block", "megatron_core_half_block", None)[len({"attn", "mlp"} & graphs)],
        experts=(router if has_router else None, dispatch) if is_grouped else (None, None),
        local_expert=None if is_grouped else f"{name}_expert",
        product="megatron_core_product" if has_engine and is_grouped else None,
        norms=event_pair("megatron_core_norm"),
        linears=event_pair("megatron_core_linear"),
        attention=event_pair("megatron_core_unfused_attention")[0] if training.attention == "math" else None,
        pairing=f"{name}_pairing" if table.overlap_expert_parallel else None,
    )


def check_router_padding(
    table: MegatronTable, split: ExpertSplit, training: TrainingConfig, model: ModelSpec
) -> None:
    """Raises InputError where Megatron refuses a padded routing map (core 0.16.1
    core/transformer/transformer_config.py)."""
    if not table.moe_router_padding or not has_experts(model):
        return
    key = "strategy.moe_router_padding"
    if training.precision != "fp8":
        raise InputError(
            f"{key}: found true with precision {training.precision}, which Megatron refuses; expected "
            "training.precision fp8, or false"
        )
    if split.dispatcher == "all-gather":
        raise InputError(
            f"{key}: found true with dispatcher 'all-gather', with which Megatron refuses it; expected "
            "another parallelism.dispatcher, or false"
        )


def norms_note(table: MegatronTable, model: ModelSpec) -> str | None:
    """The note on compared norms that a model does not have. None where it has some, or where `test_mode` is
    off.
    """
    modules = (module for block in model.unique_blocks for module in block.modules)
    if not table.test_mode or any(module.name.endswith("k_layernorm") for module in modules):
        return None
    return f"strategy.test_mode has no effect: '{model.name}' has no norms of Megatron's --qk-layernorm"


def shared_overlap_note(
    table: MegatronTable, parallelism: ParallelismConfig, training: TrainingConfig, model: ModelSpec
) -> str | None:
    """The note on overlapped shared experts that a model does not have. None where it has some, or none were
    asked for.

    Raises InputError where Megatron refuses them (core 0.16.1 core/transformer/transformer_config.py). Raises
    NotSimulatedError with Megatron-FSDP and with adapters on them.
    """
    if not table.overlap_shared_experts:
        return None
    key = "strategy.overlap_shared_experts"
    shared = [module for block in model.unique_blocks for module in shared_modules(block)]
    if not shared:
        return f"{key} has no effect: '{model.name}' has no shared experts"
    if table.fsdp_sharding is not None:
        raise NotSimulatedError(
            f"{key}: found true with Megatron-FSDP, beside which zsim does not simulate it; expected no "
            "fsdp_sharding, or false"
        )
    if parallelism.experts.dispatcher != "all-to-all":
        raise InputError(
            f"{key}: found true with dispatcher '{parallelism.experts.dispatcher}'; Megatron has it with "
            "'all-to-all' alone"
        )
    if "shared_experts" in training.recompute_modules:
        raise InputError(
            f"{key}: found true with recompute_modules 'shared_experts', beside which Megatron refuses it; "
            "expected one of the two"
        )
    if any(module.is_adapter_part for module in shared):
        raise NotSimulatedError(
            f"{key}: found true with adapters on shared experts, which zsim does not simulate; expected "
            'false, or training.lora.targets = ["linear_qkv", "linear_proj"]'
        )
    return None


def check_overlap(table: MegatronTable, parallelism: ParallelismConfig, training: TrainingConfig) -> None:
    """Raises InputError where Megatron refuses to overlap experts' exchanges with another micro-batch.

    Raises NotSimulatedError with Megatron-FSDP.
    """
    if not table.overlap_expert_parallel:
        return
    experts = parallelism.experts
    if experts.ranks == 1 or experts.dispatcher not in ("all-to-all", *DEDUPLICATING_DISPATCHERS):
        raise InputError(
            f"{_KEY}: found true with expert = {experts.ranks} and dispatcher '{experts.dispatcher}'; "
            "Megatron overlaps expert parallelism above 1 with 'all-to-all', 'deepep' or 'hybridep'"
        )
    if parallelism.pipeline > 1 and parallelism.virtual_stages == 1:
        raise InputError(
            f"{_KEY}: found true with pipeline = {parallelism.pipeline} without virtual stages, which "
            "Megatron refuses; expected parallelism.virtual_stages above 1"
        )
    policies = {training.activation_checkpointing, *(training.block_checkpointing or ())}
    if "full" in policies or "moe" in training.recompute_modules:
        raise InputError(
            f"{_KEY}: found true with recomputed layers of experts, which Megatron refuses; expected "
            "activation_checkpointing 'none' or 'selective', and no 'moe' in recompute_modules"
        )
