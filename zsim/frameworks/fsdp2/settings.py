"""The settings of torch's `fully_shard`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field, StrictBool, field_validator

from zsim.frameworks.torch.fsdp_table import FsdpTable
from zsim.specs.messages import TypedTable
from zsim.specs.strategy.registry import Framework
from zsim.specs.strategy.table import Count, StrategyConfig


class Fsdp2Table(FsdpTable):
    """`kind = "fsdp2"`: torch `fully_shard`. `replicate` > 1 is HSDP."""

    kind: Literal["fsdp2"] = Field(description="whose data parallelism")
    wrapping: str = Field(
        default="torchtitan",
        description='units: "torchtitan" or "huggingface" (each block, and the rest), "blocks:N" (N blocks), '
        'or "automodel" (NeMo AutoModel\'s mixtures)',
    )
    reshard_after_forward: StrictBool | Count | None = Field(
        default=None,
        description="free units after forward; a number: keep them sharded over so many ranks; left "
        "out: all but the last",
    )

    defer_all_reduce: bool = Field(
        default=False,
        description="HSDP's gradients are all-reduced after the last micro-batch only "
        "(set_requires_all_reduce)",
    )
    offload_states: bool = Field(
        default=False,
        description="optimizer states are in host memory between updates, which run on the GPU",
    )
    precompute_fp8_scales: bool = Field(
        default=False, description="one all-reduce of the scales of all fp8 weights, after the update"
    )

    @field_validator("reshard_after_forward", mode="before")
    @classmethod
    def _check_reshard_value(cls, value: object) -> object:
        is_group = isinstance(value, int) and value >= 1
        if not (value is None or isinstance(value, bool) or is_group):
            raise ValueError(f"expected true, false or a group size, found {value!r}")
        return value


class Fsdp2(TypedTable, Fsdp2Table):
    """Torch's `fully_shard`. `zsim.Fsdp2(replicate=8)` is hybrid sharding (HSDP) with 8 replicas."""

    kind: Literal["fsdp2"] = Field(default="fsdp2", description="whose data parallelism")


@dataclass(frozen=True, slots=True)
class Fsdp2Config(StrategyConfig):
    """torch `fully_shard`."""

    kind: ClassVar[str] = "fsdp2"

    reshard_after_forward: bool | int | None
    """None is the default of the wrapping: True, but False for the root."""
    replicate: int
    """Replicas of the sharded group. More than 1 is HSDP."""
    wrapping: str
    param_dtype: str
    """The type that is gathered. With "fp8" the weights of fp8 products are gathered in fp8 and all other
    parameters in bf16, and the maximum of each weight is all-reduced before it is gathered.
    """
    reduce_dtype: str
    no_sync: bool
    """Gradients are reduced only after the last micro-batch."""
    reduce_scatter_max_input_buffers: int = 1
    cpu_offload: bool = False
    offload_states: bool = False
    """Optimizer states are in host memory but for the update."""
    gpus_per_node: int = 8
    """GPUs that DTensor takes for a node when it weighs collectives."""
    job_gpus_per_node: int = 8
    """GPUs of the job that are on one node."""
    defers_all_reduce: bool = False
    """Reduced shards are all-reduced over the replicas only after the last micro-batch."""
    precomputes_scales: bool = False
    """The maxima of all fp8 weights are all-reduced in one collective after the update."""

    def label(self, world_size: int, ranks: int) -> str:
        if self.replicate > 1:
            return f"HSDP {self.replicate} x {ranks // self.replicate}"
        return "FSDP2"


class Fsdp2Framework(Framework[Fsdp2Table, Fsdp2Config]):
    table = Fsdp2Table
    title = "FSDP"
    order = 3
    other_names = dict.fromkeys(
        ("fsdp", "fullyshard", "torchtitan"), 'kind = "fsdp2" for fully_shard, the newer of torch'
    ) | dict.fromkeys(("hsdp", "hybridshard"), 'kind = "fsdp2" and replicate = the number of replicas')
    unread_keys = frozenset({"training.lora.preparation", "training.autocast", "parallelism.capacity_factor"})


FRAMEWORK = Fsdp2Framework()
