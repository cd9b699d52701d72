"""Megatron-Bridge's adapters, on Megatron's own products.

See also [Note: adapters on experts] of `zsim.specs.model.expert_adapters`.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.errors import InputError, NotSimulatedError
from zsim.specs.experiment.training.lora_table import LoraTable
from zsim.specs.model.adapters import ALL_LINEAR, Adapters
from zsim.specs.model.expert_layer import has_experts
from zsim.specs.model.fusion import FUSED_PRODUCTS, fuse_named_products
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.experts import ExpertSplit
from zsim.specs.strategy.parallelism import ParallelismConfig


def uses_bridge(lora: LoraTable, model: ModelSpec, parallelism: ParallelismConfig) -> bool:
    """Whether the adapters are Megatron-Bridge's, on Megatron's own products.

    They are if they have one of its names, if the job has model parallelism, or where a mixture of experts
    has no names.
    """
    targets = lora.targets if isinstance(lora.targets, tuple) else ()
    is_named = any(name.rpartition(".")[2] in FUSED_PRODUCTS for name in targets)
    is_all = lora.targets in (None, ALL_LINEAR) and has_experts(model)
    return is_named or is_all or not parallelism.is_trivial


def adapt_products(
    lora: LoraTable, model: ModelSpec, parallelism: ParallelismConfig
) -> tuple[ModelSpec, LoraTable]:
    """The model with Megatron's products, and the adapters on them. Without names the adapters are on all
    four products (Megatron-Bridge 0.6.0 peft/lora.py).

    Each tensor-parallel rank has a part of both weights (`ParallelLinearAdapter`, peft/utils.py).
    """
    targets = lora.targets
    if targets in (None, ALL_LINEAR):
        targets = FUSED_PRODUCTS
    names = targets if isinstance(targets, tuple) else ()
    model = fuse_named_products(model)
    others = [name for name in names if name.rpartition(".")[2] not in FUSED_PRODUCTS]
    if not names or not all(_has_product(model, name) for name in others):
        raise InputError(
            f"training.lora.targets: found {lora.targets!r} with Megatron's parallelisms, whose layers "
            f"have the products {', '.join(FUSED_PRODUCTS)}; expected some of these"
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
    model_targets = [
        name for name in names if _has_product(model, name) or (has_experts(model) and "_fc" in name)
    ]
    return model, lora.model_copy(update={"targets": tuple(model_targets) if lora.targets is None else names})


def adapt_experts(adapters: Adapters, lora: LoraTable, split: ExpertSplit) -> Adapters | None:
    """The adapters with those on routed experts, one for all that run together or one for each. None without
    a target that experts have.
    """
    if not any("linear_fc" in target for target in adapters.targets):
        return None
    if lora.target_parameters:
        raise InputError(
            f"training.lora.target_parameters: found {lora.target_parameters[0]!r} beside Megatron's "
            "targets; Megatron-Bridge adapts experts by linear_fc1 and linear_fc2, expected it left out"
        )
    shares = lora.share_expert_adapters and split.kernel != "loop"
    return replace(adapters, experts="shared" if shares else "each")


def _has_product(model: ModelSpec, name: str) -> bool:
    return any(module.name.rpartition(".")[2] == name for block in model.blocks for module in block.modules)
