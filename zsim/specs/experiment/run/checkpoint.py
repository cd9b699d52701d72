"""`[run.checkpoint]` of an experiment: how often state is saved, how, and in which files.

[run.checkpoint]
every = "auto"                      # steps, a time ("30 min"), or auto: the interval of the fewest days
mode = "async"                      # sync | async | in-memory | local-then-remote | none
staging = "pinned"                  # pageable | pinned
writer = "process"                  # thread | process
format = "dcp"                      # left out: the framework's own. Or dcp | deepspeed |
                                    # universal | megatron | full
keep = 3
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from zsim.specs.lazy_model import FiniteTable
from zsim.specs.strategy.registry import values_of
from zsim.specs.strategy.requirement import left_out, phrase
from zsim.units import DURATION, Bytes, Duration, parse_quantity

CheckpointMode = Literal["sync", "async", "in-memory", "local-then-remote", "none"]
if TYPE_CHECKING:
    CheckpointFormat = str
else:
    CheckpointFormat = Literal[values_of("run.checkpoint.format")]
Staging = Literal["pageable", "pinned"]
Writer = Literal["thread", "process"]
_Steps = Annotated[int, Field(gt=0, strict=True)]
TWO_TIERS: tuple[CheckpointMode, ...] = ("in-memory", "local-then-remote")


def steps_or_time(value: Any) -> Any:
    """A number of steps, or a time with a unit, unchanged. Raises ValueError for anything else."""
    if isinstance(value, str) and value != "auto":
        if parse_quantity(value, DURATION) <= 0:
            raise ValueError(f"'{value}' must be more than nothing")
    elif not isinstance(value, str) and (isinstance(value, bool) or not isinstance(value, int) or value <= 0):
        raise ValueError(f"found {value!r}, expected steps (500) or a time ('30 min')")
    return value


class CheckpointTable(FiniteTable):
    """`[run.checkpoint]`.

    In mode "sync" training waits until everything is written, and in "async" until it is staged in host
    memory. In mode "in-memory" each node's shard is copied to the host memory of another node. In
    "local-then-remote" it is copied to the node's drives and from there to the store. Only the store survives
    the loss of a node together with its peer (in-memory), or of a node (local-then-remote).
    """

    every: int | str = Field(
        default="auto",
        description='interval of saves (with two tiers: of the first), in steps or time; "auto": the best',
    )
    mode: CheckpointMode = Field(
        default="sync",
        description="what training waits for: writing, staging in host memory, or a copy in a peer's "
        "memory or on local drives",
    )
    remote_every: int | str | None = Field(
        default=None,
        description="how often a save of two tiers reaches the store; left out: the best interval of saves "
        "to the store alone that it can take",
    )
    staging: Staging = Field(
        default="pageable", description="host memory that state is copied to, as torch's `async_save` has it"
    )
    writer: Writer = Field(
        default="thread",
        description="background writer: a thread, which slows launches, or a process",
    )
    format: CheckpointFormat | None = Field(
        default=None,
        description="whose files; universal: "
        + phrase("run.checkpoint.format")
        + ", converted before each load, for any number of ranks; left out: the framework's",
    )
    threads: _Steps = Field(default=1, description="threads of a rank that write, each its own file")
    single_file_per_rank: bool = Field(
        default=True,
        description="one file per rank or thread; false: per tensor; "
        + phrase("run.checkpoint.single_file_per_rank"),
    )
    saves_16bit_model: bool = Field(
        default=False,
        description="also gathers parameters into one file, as " + phrase("run.checkpoint.saves_16bit_model"),
    )
    plan_caching: bool = Field(
        default=False,
        description="plans are kept between saves: " + phrase("run.checkpoint.plan_caching"),
    )
    keep: _Steps | None = Field(
        default=None, description="saves that are kept; left out: " + left_out("run.checkpoint.keep")
    )
    archive_every: Duration | None = Field(
        default=None, description="how often a save is kept for ever; left out: none is"
    )
    blocking: Duration | None = Field(
        default=None,
        description="time that training waits for a save, measured, in place of the simulation's; left out: "
        "simulated",
    )
    durable: Duration | None = Field(
        default=None, description="time from the start of a save to its commit, measured; left out: simulated"
    )
    slowdown: Duration | None = Field(
        default=None,
        description="time that writing in the background adds to the steps beside it, measured; left out: "
        "simulated",
    )
    load: Duration | None = Field(
        default=None, description="time to read a save back, measured; left out: simulated"
    )
    bytes: Bytes | None = Field(
        default=None, description="size of a save, measured; left out: counted from the model's states"
    )

    @field_validator("every", "remote_every", mode="before")
    @classmethod
    def _is_an_interval(cls, value: Any) -> Any:
        return value if value is None else steps_or_time(value)

    @model_validator(mode="after")
    def _fits_its_mode(self) -> Self:
        if self.remote_every is not None and self.mode not in TWO_TIERS:
            raise ValueError(
                f"remote_every has no effect with mode '{self.mode}'; it is for {_two_tier_names()}"
            )
        if self.remote_every == "auto":
            raise ValueError(
                "remote_every: found 'auto', expected steps (5000) or a time ('2 h'), or nothing"
            )
        if self.durable is not None and self.durable < (self.blocking or 0.0):
            raise ValueError(
                "durable is from the start of a save to its commit; expected at least the time of blocking"
            )
        return self

    def seconds_of(self, value: int | str, step_seconds: float) -> float:
        """An interval of this table in seconds of steps."""
        return value * step_seconds if isinstance(value, int) else parse_quantity(value, DURATION)


def _two_tier_names() -> str:
    return " and ".join(f"'{mode}'" for mode in TWO_TIERS)
