"""The model as `[training]` trains it: adapters on its products, frozen weights, and the types of both.

# [Note: the types of adapters and of frozen weights]
A checkpoint is loaded in the low type, and stays so where it is frozen. PEFT keeps adapters in fp32. torch's
FSDP casts what it gathers. DDP trains under autocast, which casts at every product. Where a whole model is
kept in 16 bits (`stored_dtype`) nothing casts, so adapters compute in fp32. DeepSpeed's engine and Megatron
cast every weight, and keep fp32 masters of those that are trained. With a product in 4 bits PEFT leaves the
adapter's casts to autocast, which has none to do in 16 bits (0.21.2 tuners/lora/bnb.py).
"""

from __future__ import annotations

from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.operations.operation import Role
from zsim.specs.experiment.tables import TrainingTable
from zsim.specs.experiment.training.adapted_experts import adapt_experts, check_has_experts
from zsim.specs.experiment.training.lora_table import LoraTable, merge_adapter_config
from zsim.specs.experiment.training.quantisation import (
    check_quantised,
    is_prepared,
    product_type,
    quantisation_notes,
)
from zsim.specs.experiment.training.unmatched_names import check_targets, unmatched_notes
from zsim.specs.model.adapters import ALL_LINEAR, Adapters, add_adapters
from zsim.specs.model.expert_layer import has_experts, stacked_experts
from zsim.specs.model.expert_loop import has_linear_routers
from zsim.specs.model.freezing import FrozenParameters, freeze_parameters
from zsim.specs.model.fusion import MEGATRON_PRODUCTS, fuse_megatron_products
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.experts import ExpertSplit
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.training import Precision

# Projections that PEFT 0.21.2 adapts where nothing is named (utils/constants.py,
# TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING): of these the first that the model has.
_DEFAULT_TARGETS = (("q_proj", "v_proj"), ("query_key_value",), ("c_attn",), ("qkv_proj",), ("Wqkv",))
_CASTING_KINDS = ("deepspeed", "megatron")


def apply_training(
    model: ModelSpec,
    table: TrainingTable,
    kind: str,
    precision: Precision,
    parallelism: ParallelismConfig,
    experts: ExpertSplit,
    notes: list[str],
    *,
    is_offloaded: bool = False,
    deepspeed: DeepSpeedConfig | None = None,
) -> ModelSpec:
    """The model with adapters and frozen parameters, for a strategy of `kind`. It is unchanged without them.

    `experts` says whose code runs routed experts. Adds notes about names that match nothing to `notes`.
    Raises InputError for impossible adapters, NotSimulatedError for what zsim lacks.
    """
    lora = table.lora
    if lora is None:
        if not table.frozen:
            return model
        _check_parallelism("training.frozen", kind, parallelism)
        _check_deepspeed("training.frozen", deepspeed)
        return freeze_parameters(model, FrozenParameters(table.frozen, stored_dtype=table.frozen_dtype or ""))
    _check_parallelism("training.lora", kind, parallelism)
    if is_offloaded and kind == "fsdp1":
        raise NotSimulatedError(
            "training.lora: not simulated with FSDP1 and strategy.cpu_offload yet; expected strategy 'fsdp2'"
        )
    _check_deepspeed("training.lora", deepspeed)
    lora = merge_adapter_config(lora)
    low = {"fp8": "bf16"}.get(precision, precision)
    check_quantised(lora, kind, low)
    _check_layers(lora, model)
    if kind == "megatron" and _uses_megatron_bridge(lora, model, parallelism):
        model, lora = _convert_to_megatron_bridge(lora, model, parallelism)
    check_has_experts(lora, model)
    has_preparation = is_prepared(table, kind, model)
    adapters = _adapters(lora, table, kind, low, model, has_preparation=has_preparation)
    if stacked_experts(model) is not None:
        adapters = adapt_experts(adapters, lora, model, kind, experts, deepspeed)
        if table.recompute_modules and "moe_act" in table.recompute_modules and adapters.experts:
            raise NotSimulatedError(
                "training.recompute_modules: found 'moe_act' with adapters on routed experts, which zsim "
                "does not simulate; expected 'moe', or targets without linear_fc1 and linear_fc2"
            )
    base_model = model
    model, adapted = add_adapters(base_model, adapters)
    check_targets(base_model, adapters, adapted)
    notes += unmatched_notes(lora, base_model, adapters, adapted)
    notes += quantisation_notes(lora, base_model, kind, has_preparation=has_preparation)
    frozen = FrozenParameters(
        table.frozen,
        all_but_adapters=True,
        modules_to_save=lora.modules_to_save,
        keeps_originals=kind != "megatron",
        stored_dtype="fp32" if has_preparation else _base_type(table, kind, low),
        product_dtype=product_type(lora),
        quantises_routers=has_linear_routers(base_model),
        has_fp32_stream=has_preparation,
        inputs_require_gradients=table.activation_checkpointing != "none" or bool(table.block_checkpointing),
    )
    return freeze_parameters(model, frozen)


def _uses_megatron_bridge(lora: LoraTable, model: ModelSpec, parallelism: ParallelismConfig) -> bool:
    """Whether the adapters are Megatron-Bridge's, on Megatron's own products.

    They are if they have its names, if the job has model parallelism, or where a mixture of experts has no
    names.
    """
    targets = lora.targets if isinstance(lora.targets, tuple) else ()
    is_named = bool(targets) and all(name.rpartition(".")[2] in MEGATRON_PRODUCTS for name in targets)
    is_all = lora.targets in (None, ALL_LINEAR) and has_experts(model)
    return is_named or is_all or not parallelism.is_trivial


def _convert_to_megatron_bridge(
    lora: LoraTable, model: ModelSpec, parallelism: ParallelismConfig
) -> tuple[ModelSpec, LoraTable]:
    """The model with Megatron's products, and the adapters on them. Without names the adapters are on all
    four products (Megatron-Bridge 0.6.0 peft/lora.py).

    Each tensor-parallel rank has a part of both weights (`ParallelLinearAdapter`, peft/utils.py).
    """
    targets = lora.targets
    if targets in (None, ALL_LINEAR):
        targets = MEGATRON_PRODUCTS
    names = targets if isinstance(targets, tuple) else ()
    if not names or any(name.rpartition(".")[2] not in MEGATRON_PRODUCTS for name in names):
        raise InputError(
            f"training.lora.targets: found {lora.targets!r} with Megatron's parallelisms, whose layers "
            f"have the products {', '.join(MEGATRON_PRODUCTS)}; expected some of these"
        )
    if lora.rank % parallelism.tensor or any(r % parallelism.tensor for r in lora.rank_pattern.values()):
        raise InputError(
            f"training.lora.rank: found {lora.rank}, which the {parallelism.tensor} tensor-parallel ranks "
            "do not divide; the nearest that they do is "
            f"{max(1, round(lora.rank / parallelism.tensor)) * parallelism.tensor}"
        )
    if parallelism.async_tensor:
        raise NotSimulatedError(
            "parallelism.async_tensor: found true with training.lora, which zsim does not simulate; "
            "expected false"
        )
    model = fuse_megatron_products(model)
    model_targets = [
        name for name in names if _has_product(model, name) or (has_experts(model) and "_fc" in name)
    ]
    return model, lora.model_copy(update={"targets": tuple(model_targets) if lora.targets is None else names})


def _has_product(model: ModelSpec, name: str) -> bool:
    return any(module.name.rpartition(".")[2] == name for block in model.blocks for module in block.modules)


def _adapters(
    lora: LoraTable, table: TrainingTable, kind: str, low: str, model: ModelSpec, *, has_preparation: bool
) -> Adapters:
    """See [Note: the types of adapters and of frozen weights]."""
    is_plain = lora.quantized is None or has_preparation
    stored_dtype = "" if kind in _CASTING_KINDS else lora.dtype or "fp32"
    is_low = table.stored_dtype != "fp32"
    targets, is_pattern = _targets(lora, model)
    return Adapters(
        lora.rank,
        targets,
        is_pattern,
        lora.dropout,
        lora.rank_pattern,
        lora.layers,
        (lora.exclude,) if isinstance(lora.exclude, str) else lora.exclude,
        isinstance(lora.exclude, str),
        lora.modules_to_save,
        stored_dtype=stored_dtype,
        compute_dtype="fp32" if stored_dtype == "fp32" and is_low else "",
        routers_are_linear=has_linear_routers(model),
        recasts=stored_dtype == "fp32" and kind == "ddp" and low != "fp32" and not is_low and is_plain,
    )


def _base_type(table: TrainingTable, kind: str, low: str) -> str:
    if kind in _CASTING_KINDS or table.stored_dtype != "fp32" or low == "fp32":
        return table.frozen_dtype or ""
    return table.frozen_dtype or low


def _targets(lora: LoraTable, model: ModelSpec) -> tuple[tuple[str, ...], bool]:
    """The targets, and whether they are a pattern."""
    if lora.targets == ALL_LINEAR:
        return (ALL_LINEAR,), False
    if isinstance(lora.targets, tuple):
        return lora.targets, False
    if lora.targets is not None:
        return (lora.targets,), True
    block = model.blocks[0].modules if model.blocks else ()
    names = {module.name.rpartition(".")[2] for module in block if module.role is Role.PRODUCT}
    for targets in _DEFAULT_TARGETS:
        if names.issuperset(targets):
            return targets, False
    raise InputError(
        f"training.lora.targets: missing; PEFT has no default for '{model.name}', expected some of "
        f'{", ".join(sorted(names))}, or "all-linear"'
    )


def _check_parallelism(key: str, kind: str, parallelism: ParallelismConfig) -> None:
    if kind == "reference":
        raise NotSimulatedError(
            f"{key}: the reference engine trains every parameter; expected another strategy"
        )
    unsupported = {"megatron": (), "fsdp2": ("tensor", "pipeline")}.get(
        kind, ("tensor", "pipeline", "context")
    )
    for name in unsupported:
        if getattr(parallelism, name) > 1:
            raise NotSimulatedError(
                f"{key}: not simulated with {name} parallelism under strategy '{kind}'; expected {name} = "
                "1, or strategy 'megatron'"
            )


def _check_deepspeed(key: str, config: DeepSpeedConfig | None) -> None:
    if config is None or config.stage != 3:
        return
    zero = config.zero
    param = zero.offload_param
    features = {
        "mics_shard_size": zero.is_mics,
        "zero_hpz_partition_size": zero.zero_hpz_partition_size > 1,
        "zero_quantized_weights": zero.zero_quantized_weights,
        "zero_quantized_gradients": zero.zero_quantized_gradients,
        "zero_quantized_nontrainable_weights": zero.zero_quantized_nontrainable_weights,
        "offload_param.device 'nvme'": param is not None and param.device == "nvme",
    }
    for setting, is_on in features.items():
        if is_on:
            raise NotSimulatedError(
                f"{key}: not simulated with {config.name}: zero_optimization.{setting} yet; expected stage 3 "
                "without it"
            )


def _check_layers(lora: LoraTable, model: ModelSpec) -> None:
    invalid_numbers = [number for number in lora.layers if not 0 <= number < len(model.blocks)]
    if invalid_numbers:
        raise InputError(
            f"training.lora.layers: found {invalid_numbers[0]}, but '{model.name}' has the blocks 0 to "
            f"{len(model.blocks) - 1}"
        )
