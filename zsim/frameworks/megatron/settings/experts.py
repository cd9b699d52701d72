"""Megatron's layers and routed experts: their cost to the host, and the checks of overlapped exchanges.

Read in Megatron-LM d98e8a64: `TransformerConfig.__post_init__` of
megatron/core/transformer/transformer_config.py.
"""

from __future__ import annotations

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


def block_overhead(table: MegatronTable, has_core: bool) -> str | None:
    """The event of presets/frameworks.toml at every pass through a layer.

    It is half of it where a graph has the layer's attention or its dense MLP, and none where graphs have
    both.
    """
    if table.cuda_graph or table.engine == "internevo":
        return None
    if table.engine == "nanotron":
        return "nanotron_block"
    num_graphs = len({"attn", "mlp"} & set(table.cuda_graph_modules))
    if not has_core:
        return "megatron_block"
    block_event = "megatron_core_deterministic_block" if table.deterministic_mode else "megatron_core_block"
    return (block_event, "megatron_core_half_block", None)[num_graphs]


def attention_overhead(table: MegatronTable, training: TrainingConfig, has_core: bool) -> str | None:
    """The event, in addition to a block's, where Transformer Engine's attention runs without a fused
    kernel.
    """
    is_seen = not table.cuda_graph and "attn" not in table.cuda_graph_modules
    is_unfused = training.attention == "math"
    return (
        "megatron_core_unfused_attention"
        if has_core and table.runs_transformer_engine and is_seen and is_unfused
        else None
    )


def expert_overheads(table: MegatronTable, has_core: bool) -> tuple[str | None, str | None]:
    """The events at a layer's router and at each of its two grouped products, forward and backward.

    With a graph of `moe_preprocess` the operators before an all-to-all are in it.
    """
    if not has_core or table.engine != "megatron" or not table.moe_grouped_gemm or table.cuda_graph:
        return None, None
    graphs = table.cuda_graph_modules
    router = "megatron_core_experts" if table.deterministic_mode else ROUTING
    dispatch = FUSED_DISPATCH if router == ROUTING and "moe_preprocess" in graphs else router
    return (None if "moe_router" in graphs else router), dispatch


def product_overhead(table: MegatronTable, has_core: bool) -> str | None:
    """The event of each product of an expert beyond the first expert's.

    Transformer Engine launches one for every expert. Megatron's own modules have no Python for each.
    """
    if not has_core or not table.runs_transformer_engine or not table.moe_grouped_gemm or table.cuda_graph:
        return None
    return "megatron_core_product"


def norm_overheads(table: MegatronTable, has_core: bool) -> tuple[str | None, str | None]:
    """The events of Transformer Engine's norms that are modules of their own.

    The first is of a layer's attention, the second of the norm before its router. In a graph there is none.
    """
    if not has_core or not table.runs_transformer_engine or table.cuda_graph:
        return None, None
    name, graphs = "megatron_core_norm", table.cuda_graph_modules
    return None if "attn" in graphs else name, None if "moe_router" in graphs else name


def linear_overheads(table: MegatronTable, has_core: bool) -> tuple[str | None, str | None]:
    """The events of Transformer Engine's dense products beyond the four that a block is fitted with.

    The first is of attention, the second of shared experts, which a graph of the router has, too.
    """
    attention, experts = norm_overheads(table, has_core)
    name = "megatron_core_linear"
    return name if attention else None, name if experts else None


def local_expert_overhead(table: MegatronTable, has_core: bool) -> str | None:
    """The event of one local expert at each of its two products, where experts run one after the other."""
    if not has_core or table.engine != "megatron" or table.moe_grouped_gemm or table.cuda_graph:
        return None
    return "megatron_core_deterministic_expert" if table.deterministic_mode else "megatron_core_expert"


def pairing_overhead(table: MegatronTable, has_core: bool) -> str | None:
    """The event, in addition to a block's, where exchanges of experts run during another micro-batch's
    layers.
    """
    if not has_core or table.engine != "megatron" or not table.overlap_expert_parallel or table.cuda_graph:
        return None
    return "megatron_core_deterministic_pairing" if table.deterministic_mode else "megatron_core_pairing"


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
