"""The `[parallelism]` table, in the shape of its file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictBool

from zsim.specs.lazy_model import StrictTable
from zsim.specs.model.spec import ContextMethod
from zsim.specs.strategy.experts import Dispatcher
from zsim.specs.strategy.requirement import left_out, phrase

Count = Annotated[int, Field(gt=0, strict=True)]
Number = Annotated[int, Field(ge=0, strict=True)]
ScheduleName = Literal[
    "gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zbv-zero-bubble",
    "dualpipe-v",
]  # fmt: skip


class ParallelismTable(StrictTable):
    """`[parallelism]`. Degrees left out are 1, and data parallelism is what remains of the GPUs.

    With `context` a micro-batch belongs to a group of ranks. Sequences that ranks of DeepSpeed's Ulysses load
    one each are separate micro-batches. A pipeline of several `passes` runs gradient_accumulation_steps /
    passes micro-batches in each.
    """

    tensor: Count = Field(default=1, description="tensor-parallel ranks")
    sequence_parallel: StrictBool | None = Field(
        default=None,
        description="norms and residuals on a part of the sequence each; left out: "
        + left_out("parallelism.sequence_parallel"),
    )
    async_tensor: StrictBool = Field(
        default=False, description="overlap tensor-parallel collectives with products, piece by piece"
    )
    overlap_tensor_reduce: StrictBool | None = Field(
        default=None, description="sum inputs' gradients beneath weights' products; left out: by the release"
    )
    gather_per_product: StrictBool = Field(
        default=False,
        description="products that read one input reduce its gradient, and unless compiled gather it, each "
        "by itself, as torch's `ColwiseParallel` alone does",
    )
    loss_parallel: StrictBool = Field(
        default=True, description="each tensor-parallel rank computes the loss of its part of the vocabulary"
    )
    pipeline: Count = Field(default=1, description="pipeline-parallel ranks")
    schedule: ScheduleName | None = Field(
        default=None, description="pipeline schedule; left out: the framework's"
    )
    schedule_csv: str | None = Field(
        default=None, description="a schedule in torch's CSV format; left out: `schedule`"
    )
    virtual_stages: Count | None = Field(
        default=None,
        description="stages on each pipeline rank; left out: as many as the schedule needs, mostly 1",
    )
    first_stage_less_layers: Number | None = Field(
        default=None,
        description="fewer layers, for the embedding; left out: "
        + left_out("parallelism.first_stage_less_layers"),
    )
    last_stage_less_layers: Number | None = Field(
        default=None,
        description="fewer layers, for head and loss; left out: "
        + left_out("parallelism.last_stage_less_layers"),
    )
    layers_per_stage: tuple[Number, ...] | None = Field(
        default=None,
        description="layers of every stage, one number per virtual stage, in model order; 0: embedding, "
        "head or nothing alone; left out: equal parts, but for the two keys above",
    )
    passes: Count = Field(
        default=1, description="pipeline passes per step, which divide its micro-batches evenly"
    )
    context: Count = Field(default=1, description="context-parallel ranks")
    context_method: ContextMethod | None = Field(
        default=None,
        description="how attention sees whole sequences; left out: the framework's own: "
        + left_out("parallelism.context_method")
        + "; layers with a window need 'all-gather' or 'all-to-all', torch's are FlexAttention then",
    )
    expert: Count = Field(default=1, description="expert-parallel ranks")
    expert_tensor: Count | None = Field(
        default=None,
        description="ranks that share an expert's products; left out: "
        + left_out("parallelism.expert_tensor"),
    )
    dispatcher: Dispatcher | None = Field(
        default=None, description="how tokens are dispatched to experts; left out: the framework's"
    )
    capacity_factor: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="capacity of an expert over the mean load; left out: no limit"
    )
    expert_imbalance: (
        Annotated[float, Field(ge=1)] | tuple[Annotated[float, Field(ge=0)], ...] | str | None
    ) = Field(
        default=None,
        description="rows of the fullest rank over the mean, 1 where balance is forced (by experts in turn "
        "if the framework's option does so; a load per rank, all equal, draws them); a load per rank; the "
        "name of a published spread; or 'seed:N'; left out: as measured of routers with so many experts, or "
        "of padded experts in a run's first steps",
    )
    expert_padding: bool = Field(
        default=False,
        description="every expert's rows are padded to the fullest's, `expert_imbalance` times the mean, as "
        + phrase("parallelism.expert_padding")
        + " want them (without `expert`)",
    )
    order: str | None = Field(
        default=None,
        description='axes of the mesh from the fastest on, as in "tp-cp-dp-pp"; left out: that one',
    )
