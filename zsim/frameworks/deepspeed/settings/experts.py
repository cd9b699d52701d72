"""Routed experts under DeepSpeed: the layer that has them, and the combinations with it that DeepSpeed
refuses.

Read in DeepSpeed 0.19.1 to 0.19.8: `moe/layer.py` and `moe/sharded_moe.py` (the layer that a script builds),
`module_inject/auto_ep.py` and its presets (AutoEP, since 0.19.2, puts a layer of its own in the place of
transformers'), `runtime/engine.py` (`_validate_zero3_moe_compatibility`), `runtime/zero/stage_1_and_2.py`
(`_configure_moe_settings`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.expert_libraries import AUTOEP, DEEPSPEED_MOE
from zsim.frameworks.deepspeed.parallelism import SPLIT_LAYERS
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.settings.schema import ExpertParallelBlock
from zsim.frameworks.deepspeed.settings.table import DeepSpeedTable
from zsim.frameworks.deepspeed.settings.text import load_object
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.experts import ExpertSplit
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.parallelism_table import ParallelismTable

_AUTOEP_SINCE, _AUTOEP_WITH_STAGE_3_SINCE, _SPARSE_SINCE = (0, 19, 2), (0, 19, 3), (0, 19, 4)
_AUTOEP_WITH_AUTOTP_SINCE, _LAST_WITHOUT_AUTOTP_AT_STAGE_3 = (0, 19, 3), (0, 19, 5)
_AUTOEP_FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_5_moe_text", "deepseek_v2", "deepseek_v3")
_BLOCK = "expert_parallel"


def resolve_deepspeed_experts(
    table: DeepSpeedTable, parallelism_table: ParallelismTable, model: ModelSpec
) -> ExpertSplit:
    """The split of the model's routed experts, which says whose layer has them.

    It is AutoEP's layer if the JSON enables it or `strategy.expert_layer` says so. It is DeepSpeed's own
    layer where, without AutoEP, experts are on several ranks or have a capacity. Otherwise it is
    transformers'.

    Raises InputError for a layer that contradicts the JSON, and NotSimulatedError for a family without a
    preset of AutoEP (`module_inject/auto_ep_presets`), and for MiniMax M3.
    """
    data = load_object(table.config, table.config_name)[1] if table.config is not None else {}
    block, layer = _enabled_block(data), table.expert_layer
    if block is not None and layer == "moe":
        raise InputError(
            f"strategy.expert_layer: found 'moe', but the file enables {_BLOCK}, which is AutoEP; expected "
            "'autoep', or enabled: false"
        )
    if layer is None:
        uses_deepspeed_layer = parallelism_table.expert > 1 or parallelism_table.capacity_factor is not None
        layer = "autoep" if block is not None else "moe" if uses_deepspeed_layer else None
    if layer is None:
        return ExpertSplit()
    if data.get("use_data_before_expert_parallelism") is True:
        raise NotSimulatedError(
            "use_data_before_expert_parallelism: zsim does not simulate experts' ranks that are apart; "
            "expected false"
        )
    if layer == "moe":
        return ExpertSplit(
            library=DEEPSPEED_MOE,
            kernel="loop",
            gate_in_fp32=True,
            pads_to_capacity=True,
            agrees_on_capacity=not table.drops_tokens,
        )
    if model.family not in _AUTOEP_FAMILIES:
        raise NotSimulatedError(
            f"model '{model.name}': zsim does not simulate DeepSpeed's AutoEP for its family "
            f"'{model.family}'; expected one of {', '.join(_AUTOEP_FAMILIES)}, or strategy.expert_layer 'moe'"
        )
    is_loop = block is not None and not block.get("use_grouped_mm", True)
    return ExpertSplit(library=AUTOEP, kernel="loop" if is_loop else "grouped", gate_in_fp32=False)


def autoep_degrees(data: Mapping[str, Any]) -> dict[str, Any]:
    """{key of `[parallelism]`: value} of the JSON's `expert_parallel`, or {} if it is not enabled."""
    block = _enabled_block(data)
    if block is None:
        return {}
    degrees = {"expert": block.get("autoep_size", 1)}
    return degrees | ({"dispatcher": "deepep"} if block.get("comm_backend") == "deepep" else {})


def _enabled_block(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The JSON's `expert_parallel`, if it is enabled."""
    block = data.get(_BLOCK)
    return block if isinstance(block, Mapping) and block.get("enabled") is True else None


def check_experts(config: DeepSpeedConfig, split: ExpertSplit, parallelism: ParallelismConfig) -> None:
    """Raises InputError for what DeepSpeed refuses with its layers of experts, NotSimulatedError for what
    zsim lacks.
    """
    if split.library not in (AUTOEP, DEEPSPEED_MOE):
        return
    if split.library == AUTOEP:
        _check_autoep(config, config.expert_parallel)
    else:
        _check_layer(config)
    _check_degrees(config, split, parallelism)
    _check_zero(config)


def _check_layer(config: DeepSpeedConfig) -> None:
    if config.stage == 3:
        raise InputError(
            f"{config.name}: zero_optimization.stage: found 3 with experts in DeepSpeed's own MoE layer, "
            "which DeepSpeed refuses; expected stage 1 or 2, or strategy.expert_layer 'autoep'"
        )
    if config.release.number < _SPARSE_SINCE:
        raise NotSimulatedError(
            f"strategy.version: found {config.release} with experts in DeepSpeed's own MoE layer, whose "
            "product with a mask of all tokens and slots zsim does not simulate; expected 0.19.4 or "
            "newer"
        )


def _check_autoep(config: DeepSpeedConfig, block: ExpertParallelBlock | None) -> None:
    where, release = config.name, config.release
    if release.number < _AUTOEP_SINCE:
        raise InputError(
            f"{where}: {_BLOCK}: DeepSpeed {release} has no AutoEP; expected strategy.version 0.19.2 or newer"
        )
    if config.stage == 3 and release.number < _AUTOEP_WITH_STAGE_3_SINCE:
        raise InputError(
            f"{where}: zero_optimization.stage: found 3 with AutoEP, which DeepSpeed {release} refuses; "
            "expected stage 2, or strategy.version 0.19.3 or newer"
        )
    if block is None:
        return
    if block.expert_tensor_parallel_size != 1:
        raise InputError(
            f"{where}: {_BLOCK}.expert_tensor_parallel_size: found {block.expert_tensor_parallel_size}, "
            "which DeepSpeed reserves and refuses; expected 1"
        )
    if block.load_balance_coeff is not None:
        raise InputError(
            f"{where}: {_BLOCK}.load_balance_coeff: found {block.load_balance_coeff:g}, which DeepSpeed "
            "refuses; expected null"
        )
    if block.comm_backend == "deepep" and not block.comm_max_tokens_per_rank:
        raise InputError(
            f"{where}: {_BLOCK}.comm_max_tokens_per_rank: found 0 with comm_backend 'deepep'; expected "
            "the most tokens that a rank routes, as DeepSpeed demands"
        )
    if block.gate_up_impl == "fused" and not block.use_grouped_mm:
        raise InputError(
            f"{where}: {_BLOCK}.gate_up_impl: found 'fused' with use_grouped_mm false, which DeepSpeed "
            "refuses; expected 'separate'"
        )
    _refuse_variants(where, block)


def _refuse_variants(where: str, block: ExpertParallelBlock) -> None:
    variants = {
        "gate_up_impl": (block.gate_up_impl, ("separate",)),
        "combine_impl": (block.combine_impl, ("auto", "weighted_sum")),
        "score_apply": (block.score_apply, ("auto", "post")),
        "row_weighting_impl": (block.row_weighting_impl, ("auto", "eager")),
        "async_split_plan": (block.async_split_plan, (False,)),
    }
    for key, (value, simulated) in variants.items():
        if value not in simulated:
            raise NotSimulatedError(
                f"{where}: {_BLOCK}.{key}: zsim does not simulate {value!r}; expected {simulated[-1]!r}"
            )


def _check_degrees(config: DeepSpeedConfig, split: ExpertSplit, parallelism: ParallelismConfig) -> None:
    if parallelism.context > 1 and config.stage == 3:
        raise InputError(
            f"{config.name}: sequence_parallel_size: found {parallelism.context} with AutoEP at stage 3, "
            "which DeepSpeed refuses; expected 1"
        )
    if parallelism.tensor > 1 and split.library == AUTOEP:
        _check_folding(config, split, parallelism)
    if parallelism.tensor > 1:
        _check_lanes(split, parallelism)
    for key in ("context", "pipeline"):
        if getattr(parallelism, key) > 1:
            raise NotSimulatedError(
                f"parallelism.{key}: found {getattr(parallelism, key)} with experts in DeepSpeed's "
                "layers, which zsim simulates beside data and tensor parallelism only; expected 1"
            )
    if split.dispatcher == "deepep" and split.library == DEEPSPEED_MOE:
        raise InputError("parallelism.dispatcher: DeepSpeed's own MoE layer has 'all-to-all' only")


def _check_lanes(split: ExpertSplit, parallelism: ParallelismConfig) -> None:
    """Raises for layers around DeepSpeed's own MoE layer that are not cut as it expects."""
    where = f"parallelism.tensor: found {parallelism.tensor} with experts in DeepSpeed's own MoE layer"
    if parallelism.style.name != SPLIT_LAYERS.name or parallelism.sequence_parallel:
        setting = "sequence_parallel" if parallelism.sequence_parallel else "AutoTP"
        raise NotSimulatedError(
            f"{where} and {setting}, which zsim does not simulate: the layer drops and gathers rows that all "
            "tensor-parallel ranks have; expected Megatron's layers without sequence parallelism"
        )
    if split.tensor > 1 and split.agrees_on_capacity:
        raise InputError(
            f"{where}, whose products are cut, and strategy.drops_tokens false: DeepSpeed does not pad that "
            "capacity to the tensor-parallel ranks and refuses most; expected parallelism.expert_tensor 1, "
            "or drops_tokens true"
        )


def _check_folding(config: DeepSpeedConfig, split: ExpertSplit, parallelism: ParallelismConfig) -> None:
    """Raises InputError where a release refuses AutoTP with AutoEP, and NotSimulatedError where none does.

    The refusals are in `_validate` of 0.19.2 module_inject/auto_ep_config.py, at stage 3 in runtime/engine.py
    of 0.19.3 to 0.19.5, in `validate_folding_global` of module_inject/auto_ep_folding.py of 0.19.3 to 0.19.8,
    and for DeepEP in auto_ep_layer.py.

    # [Note: what folding does]
    Every tensor-parallel rank routes all tokens and keeps each `tensor`-th row of every expert
    (moe/ep_tp_dispatch.py `partition_assignments`). Experts' ranks follow each other across tensor-parallel
    ones. Outputs, token numbers, slots and weights are padded to the fullest rank's rows and all-gathered.
    Backward all-reduces every rank's part for itself and keeps its own. The layer's input gradient is
    averaged over the tensor-parallel ranks. So is, in fp32 and parameter by parameter, the gradient of all
    that these hold whole.
    """
    release, where = config.release, f"parallelism.tensor: found {parallelism.tensor} with AutoEP"
    if release.number < _AUTOEP_WITH_AUTOTP_SINCE:
        raise InputError(
            f"{where}, beside which DeepSpeed {release} refuses AutoTP; expected 1 (0.19.3 and newer fold "
            "both, which zsim does not simulate)"
        )
    if config.stage == 3 and release.number <= _LAST_WITHOUT_AUTOTP_AT_STAGE_3:
        raise InputError(
            f"{where} at stage 3, which DeepSpeed {release} refuses ('AutoEP with ZeRO Stage 3 does not "
            "support AutoTP yet'); expected 1"
        )
    if parallelism.pipeline > 1:
        raise InputError(
            f"{where} and a pipeline, which DeepSpeed {release} refuses ('AutoEP+AutoTP folding currently "
            "supports pp_size=1 only'); expected parallelism.pipeline 1, or tensor 1"
        )
    if parallelism.context > 1:
        raise InputError(
            f"{where} and Ulysses, which DeepSpeed {release} refuses ('mutually exclusive for AutoEP "
            "folding'); expected parallelism.context 1, or tensor 1"
        )
    if split.ranks == 1:
        raise InputError(
            f"{where} and autoep_size 1, which DeepSpeed {release} refuses ('AutoEP+AutoTP folding requires "
            "expert_parallel.autoep_size > 1'); expected parallelism.expert above 1, or tensor 1"
        )
    if config.zero.offload_optimizer is not None or config.zero.offload_param is not None:
        raise InputError(
            f"{where} and ZeRO's offload, which DeepSpeed {release} refuses ('not validated yet'); expected "
            "tensor 1, or nothing offloaded"
        )
    if split.dispatcher == "deepep":
        raise InputError(f"{where} and DeepEP, which DeepSpeed {release} refuses; expected 'all-to-all'")
    raise NotSimulatedError(
        f"{where}: DeepSpeed {release} folds experts' ranks into those of AutoTP, dispatches a part of the "
        "tokens from each and sums up routers' and experts' gradients by rules of their own, which zsim does "
        "not simulate; expected 1"
    )


def _check_zero(config: DeepSpeedConfig) -> None:
    zero, where = config.zero, f"{config.name}: zero_optimization"

    def lacks(key: str) -> NoReturn:
        raise NotSimulatedError(
            f"{where}.{key}: zsim does not simulate it with experts in DeepSpeed's layers; expected it "
            "left out"
        )

    if config.stage in (1, 2) and not zero.reduce_scatter:
        raise InputError(
            f"{where}.reduce_scatter: found false with experts in DeepSpeed's layers, which DeepSpeed "
            "refuses at stages 1 and 2; expected true"
        )
    if config.stage == 1 and not zero.contiguous_gradients:
        lacks("contiguous_gradients")
    if config.stage == 2 and not zero.contiguous_gradients:
        raise InputError(
            f"{where}.contiguous_gradients: found false with experts in DeepSpeed's layers, which DeepSpeed "
            "refuses at stage 2; expected true"
        )
    if config.stage == 3 and zero.zero_quantized_gradients:
        raise InputError(
            f"{where}.zero_quantized_gradients: found true with AutoEP at stage 3, which DeepSpeed refuses; "
            "expected false"
        )
    if config.stage == 3 and zero.zero_hpz_partition_size > 1:
        raise InputError(
            f"{where}.zero_hpz_partition_size: found {zero.zero_hpz_partition_size} with AutoEP at stage "
            "3, which DeepSpeed refuses; expected 1"
        )
    if zero.is_mics:
        raise InputError(
            f"{where}.mics_shard_size: found {zero.mics_shard_size} with AutoEP at stage 3, which DeepSpeed "
            "refuses; expected it left out"
        )
    if zero.offload_optimizer is not None:
        lacks("offload_optimizer")
    if zero.offload_param is not None:
        lacks("offload_param")
    if config.stage == 3 and zero.zero_quantized_weights:
        lacks("zero_quantized_weights")
    if config.fetches_one_by_one:
        raise NotSimulatedError(
            "strategy.fetches_one_by_one: found true with AutoEP, which no DeepSpeed that old has; "
            "expected false"
        )
