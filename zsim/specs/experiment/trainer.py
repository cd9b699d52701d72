"""`[trainer]` of an experiment: effects of the training loop and of its model code on the step.

[trainer]
metrics_per_micro_batch = 2        # composer: LanguageCrossEntropy and Perplexity, after each backward
holds_logits = "as they are"       # the logits stay referenced through backward
unpads_attention = true            # flash-attn 0.2's FlashMHA with a padding mask
reads_sequence_lengths = true      # the host asks the GPU before every attention
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from zsim.specs.lazy_model import StrictTable
from zsim.specs.model.spec import Attention, Loss, ModelSpec, Module

_Metrics = Annotated[int, Field(ge=0, le=100, strict=True)]


class TrainerTable(StrictTable):
    """`[trainer]`. Referenced logits stay until those of the next micro-batch replace them."""

    metrics_per_micro_batch: _Metrics = Field(
        default=0,
        description="extra computations of the loss per micro-batch, for logging",
    )
    holds_logits: Literal["no", "as they are", "in fp32"] = Field(
        default="no",
        description="what the trainer still references during backward: nothing, the logits, or "
        "their copy in fp32",
    )
    unpads_attention: bool = Field(
        default=False,
        description="attention gathers q, k and v by a padding mask, even without padding",
    )
    reads_sequence_lengths: bool = Field(
        default=False,
        description="the host waits for the GPU before every attention",
    )

    @model_validator(mode="after")
    def _metrics_have_logits(self) -> Self:
        if self.metrics_per_micro_batch and self.holds_logits == "no":
            raise ValueError(
                f"metrics_per_micro_batch: found {self.metrics_per_micro_batch}, but the logits that they "
                "need are released before backward; expected holds_logits = 'as they are' or 'in fp32'"
            )
        return self


def apply_trainer(model: ModelSpec, table: TrainerTable) -> ModelSpec:
    """The model with the loss and attention that the trainer runs."""
    if table == TrainerTable.model_construct():
        return model
    loss = {"num_metrics": table.metrics_per_micro_batch, "holds_logits": table.holds_logits}
    attention = {"unpads": table.unpads_attention, "host_waits": table.reads_sequence_lengths}
    blocks = (
        replace(block, modules=_replace_op_specs(block.modules, Attention, attention))
        for block in model.blocks
    )
    return replace(model, after=_replace_op_specs(model.after, Loss, loss), blocks=tuple(blocks))


def _replace_op_specs(
    modules: tuple[Module, ...], kind: type[Any], changes: dict[str, Any]
) -> tuple[Module, ...]:
    return tuple(
        replace(module, op_spec=replace(module.op_spec, **changes))
        if isinstance(module.op_spec, kind)
        else module
        for module in modules
    )
