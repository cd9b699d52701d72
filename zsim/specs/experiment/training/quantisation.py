"""Frozen weights in bitsandbytes' 4 or 8 bits: which products have them, and where they are refused.

# [Note: what is quantised]
transformers replaces every `torch.nn.Linear` but the head by bitsandbytes' `Linear4bit` (5.24
integrations/bitsandbytes.py `replace_with_bnb_linear`, which asks for `type(module) is nn.Linear`, and 4.57.6
`_replace_with_bnb_linear`). Up to 4.57 a routed expert is three of them, and in most families the router is
one. From 5 on the experts of a layer are two stacked parameters and a router has a weight of its own. Neither
is quantised, unless a program does it itself: see [Note: experts in 4 bits] of
`zsim.operations.grouped_linear`.

# [Note: what PEFT prepares]
PEFT's `prepare_model_for_kbit_training` (0.21.2 utils/other.py) casts every 16-bit parameter that is not in 4
bits to fp32: embedding, head, norms, and stacked experts. The residual stream is fp32 then, a product in 4
bits returns the type of its input, and autocast casts the head to 16 bits for its product. axolotl calls it
(067b021c loaders/model.py), but not under FSDP or ZeRO-3, nor with quantised stacked experts. TRL did up to
0.24 (models/utils.py `prepare_peft_model`), but not under FSDP or ZeRO-3, and has none from 0.26 on. It cast
embedding and head back to bf16, so that the stream was fp32 only where norms are not Liger's, which return
the type that they read. LLaMA-Factory does not (ff6d4d12 model/model_utils/checkpointing.py). Nor does
unsloth, which casts only trained weights (unsloth_zoo 2026.10.9 training_utils.py
`prepare_model_for_training`). DeepSpeed's engine casts all back. With weights in 8 bits zsim simulates none:
the product of backward would be in fp32.
"""

from __future__ import annotations

from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.specs.experiment.training.framework_training import (
    FrameworkTraining,
    kinds_where,
    phrases_of,
    training_of,
)
from zsim.specs.experiment.training.lora_table import LoraTable
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.model.expert_layer import stacked_experts
from zsim.specs.model.expert_loop import has_linear_experts, has_looped_form
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.expert_library import TRANSFORMERS
from zsim.specs.strategy.experts import ExpertSplit
from zsim.specs.strategy.table import StrategyConfig

_WHERE = "training.lora.quantized"


def check_quantised(lora: LoraTable, framework: FrameworkTraining[Any, Any], low: str) -> None:
    """Raises InputError for 4-bit weights that the framework or the precision `low` does not have."""
    if lora.quantized is None:
        return
    framework.check_quantized(_WHERE)
    if lora.quantized == "int8" and not framework.is_under_autocast:
        kinds = " or ".join(
            f"'{name}'" for name in kinds_where(lambda candidate: candidate.is_under_autocast)
        )
        raise NotSimulatedError(
            f"{_WHERE}: found 'int8' with strategy '{framework.title}', which neither shards nor casts "
            f"weights in 8 bits; expected 'nf4', or strategy {kinds}"
        )
    if low == "fp32":
        raise InputError(
            f"{_WHERE}: found '{lora.quantized}' with precision fp32; expected bf16 or fp16, in which "
            "bitsandbytes computes (bnb_4bit_compute_dtype)"
        )


def check_quantised_experts(
    lora: LoraTable,
    model: ModelSpec,
    framework: FrameworkTraining[Any, Any],
    split: ExpertSplit,
    config: StrategyConfig | None,
) -> None:
    """Raises for stacked experts in 4 bits that the model, its products or the strategy do not have."""
    where = "training.lora.quantize_experts"
    if not lora.quantize_experts:
        return
    if lora.quantized != "nf4":
        raise InputError(f'{where}: found true without training.lora.quantized = "nf4"; expected both')
    if stacked_experts(model) is None:
        raise InputError(f"{where}: '{model.name}' has no stacked experts; expected it left out")
    if split.library != TRANSFORMERS:
        strategies = " or ".join(phrases_of(lambda candidate: candidate.merging_strategy))
        raise NotSimulatedError(
            f"{where}: not simulated with this strategy of {framework.title}; expected {strategies}"
        )
    framework.check_merged_adapters(f"{where}: a weight of routed experts", config)


def product_type(lora: LoraTable) -> str:
    """The type of quantised products, "" without quantisation."""
    if lora.quantized is None:
        return ""
    if lora.quantized == "int8":
        return "int8"
    return "nf4" if lora.double_quantization else "nf4-single"


def is_prepared(table: TrainingTable, kind: str, model: ModelSpec) -> bool:
    """Whether PEFT prepares the model, see [Note: what PEFT prepares].

    Raises InputError where that is without effect, NotSimulatedError for experts that it would cast.
    """
    lora = table.lora
    if lora is None:
        return False
    where, is_stacked = "training.lora.preparation", stacked_experts(model) is not None
    if lora.quantized is None:
        if lora.preparation is not None:
            raise InputError(
                f"{where}: found '{lora.preparation}' without training.lora.quantized, which it is for; "
                "expected it left out"
            )
        return False
    is_low = table.stored_dtype != "fp32"
    is_under_autocast = training_of(kind).is_under_autocast
    if lora.quantized == "int8":
        if lora.preparation == "peft":
            raise NotSimulatedError(
                f"{where}: found 'peft' with weights in 8 bits, whose backward would be in fp32; "
                "expected 'none'"
            )
        return False
    if lora.preparation is None:
        is_cast_back = table.liger or table.cross_entropy == "unsloth" or table.frozen_dtype is not None
        return is_under_autocast and not (is_cast_back or is_stacked or is_low)
    if lora.preparation == "none":
        return False
    if not is_under_autocast or is_low:
        conflict = (
            f"training.stored_dtype '{table.stored_dtype}'" if is_under_autocast else f"strategy '{kind}'"
        )
        kinds = " or ".join(
            f"'{name}'" for name in kinds_where(lambda candidate: candidate.is_under_autocast)
        )
        raise InputError(
            f"{where}: found 'peft' with {conflict}, which has no fp32 weights beside those in 4 bits; "
            f"expected 'none', or strategy {kinds} (also of one GPU) with weights in fp32"
        )
    if table.frozen_dtype not in (None, "fp32"):
        raise InputError(
            f"{where}: found 'peft', which casts to fp32, beside training.frozen_dtype "
            f"'{table.frozen_dtype}'; leave one out"
        )
    if is_stacked:
        raise NotSimulatedError(
            f"{where}: found 'peft' with stacked experts, which it would cast to fp32; expected 'none', or "
            'training.transformers = "4.57", whose experts are in 4 bits'
        )
    return True


def quantisation_notes(
    lora: LoraTable, model: ModelSpec, framework: FrameworkTraining[Any, Any], *, has_preparation: bool
) -> list[str]:
    """Sentences about the weights that are not quantised, and about a mixture's experts.

    See [Note: what is quantised].
    """
    if lora.quantized is None:
        return []
    if lora.quantized == "int8":
        return [
            f"{_WHERE}: for products in 8 bits the host waits for the GPU, since it reads whether there are "
            "outliers, and a few columns with some are taken to be in every product",
            *_expert_notes(model),
        ]
    notes = []
    if has_preparation:
        notes.append(
            "PEFT's preparation keeps embedding, head and norms in fp32, and so the residual stream: "
            'training.lora.preparation = "none" for software without it (unsloth, LLaMA-Factory, TRL from '
            "0.26 on)"
        )
    elif framework.is_under_autocast:
        notes.append("what is not in 4 bits is in 16: PEFT's preparation, which casts it to fp32, is not run")
    return notes + ([] if lora.quantize_experts else _expert_notes(model))


def _expert_notes(model: ModelSpec) -> list[str]:
    if has_linear_experts(model):
        return [f"{_WHERE}: routed experts are quantised, each three linear layers, as in transformers 4"]
    if stacked_experts(model) is None:
        return []
    advice = '; with training.transformers = "4.57" each is three linear layers, and quantised'
    return [
        f"{_WHERE}: routed experts stay in 16 bits: their weights are stacked, and bitsandbytes quantises "
        f"linear layers alone{advice if has_looped_form(model.family) else ''}"
    ]
