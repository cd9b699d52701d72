"""Frozen weights in bitsandbytes' 4 bits: which products have them, and where they are refused.

# [Note: what is quantised]
transformers puts bitsandbytes' `Linear4bit` in the place of every `torch.nn.Linear` but the head (5.24
integrations/bitsandbytes.py `replace_with_bnb_linear`, which asks for `type(module) is nn.Linear`; 4.57.6
`_replace_with_bnb_linear`). Up to 4.57 a routed expert is three of them, and in most families the router is
one. From 5 on the experts of a layer are two stacked parameters and a router has a weight of its own; neither
is quantised.
"""

from __future__ import annotations

from zsim.errors import InputError
from zsim.specs.experiment.training.lora_table import LoraTable
from zsim.specs.model.expert_loop import has_linear_experts, has_looped_form
from zsim.specs.model.expert_run import experts_of
from zsim.specs.model.spec import ModelSpec

_WHERE = "training.lora.quantized"


def check_quantised(lora: LoraTable, kind: str, low: str) -> None:
    """Raises InputError for 4-bit weights that a strategy of `kind` or the precision `low` does not have."""
    if lora.quantized is None:
        return
    if kind == "megatron":
        raise InputError(
            f"{_WHERE}: found 'nf4' under Megatron, whose layers have no 4-bit weights; "
            "expected strategy 'ddp', 'fsdp1', 'fsdp2' or 'deepspeed'"
        )
    if low == "fp32":
        raise InputError(
            f"{_WHERE}: found 'nf4' with precision fp32; expected bf16 or fp16, in which "
            "bitsandbytes computes (bnb_4bit_compute_dtype)"
        )


def product_type(lora: LoraTable) -> str:
    """The type of quantised products, "" without quantisation."""
    if lora.quantized is None:
        return ""
    return "nf4" if lora.double_quantization else "nf4-single"


def quantisation_notes(lora: LoraTable, model: ModelSpec) -> list[str]:
    """What is made of a mixture's experts; see [Note: what is quantised]."""
    if lora.quantized is None:
        return []
    if has_linear_experts(model):
        return [f"{_WHERE}: routed experts are in 4 bits, each three linear layers, as in transformers 4"]
    if experts_of(model) is None:
        return []
    way = '; with training.transformers = "4.57" each is three linear layers, in 4 bits'
    return [
        f"{_WHERE}: routed experts stay in 16 bits: their weights are stacked, and bitsandbytes quantises "
        f"linear layers alone{way if has_looped_form(model.family) else ''}"
    ]
