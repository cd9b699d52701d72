"""`[run.recovery]` of an experiment: from a failure back to training.

[run.recovery]
detect = "10 min"
restart = "4 min"                   # left out: simulated
spares = 16
policy = "restart"                  # restart | shrink | in-process | per-step
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from zsim.errors import NotSimulatedError
from zsim.units import Duration

RecoveryPolicy = Literal["restart", "shrink", "in-process", "per-step"]
_REROUTING_SYSTEMS = ("bamboo", "oobleck", "recycle", "parcae", "unicron", "swift", "trainmover")
_Count = Annotated[int, Field(ge=0, strict=True)]


class RecoveryTable(BaseModel):
    """`[run.recovery]`.

    With policy "restart" all ranks stop, and failed nodes are replaced from `spares` or their repair is
    awaited. With "shrink", training without a spare goes on with fewer nodes at the same batch per GPU, and
    grows when nodes are back. "in-process" is like "restart", but processes stay, so that only communicators
    and loading are needed unless a node is lost. With "per-step" the other replicas of HSDP go on after
    `stall` while one is missing, and wait `rejoin` when it is back (torchft).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, allow_inf_nan=False)

    policy: RecoveryPolicy = Field(
        default="restart",
        description="what happens: all restart, fewer nodes go on, processes stay, or the other "
        "replicas go on (torchft)",
    )
    detect: Duration | None = Field(
        default=None,
        description="time from a failure until all ranks have stopped; left out: by crash or hang",
    )
    crash_detect: Duration = Field(default=30.0, description="time until a crash is noticed")
    hang_fraction: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.1, description="failures that nobody reports, so that ranks wait for a collective"
    )
    hang_timeout: Duration | None = Field(
        default=None, description="time until such a collective gives up; left out: the framework's own"
    )
    restart: Duration | None = Field(
        default=None, description="processes, communicators, compilation, first step; left out: simulated"
    )
    swap: Duration = Field(default=60.0, description="time to bring a spare in")
    spares: _Count = Field(default=0, description="nodes that wait to replace others")
    least_nodes: Annotated[int, Field(gt=0, strict=True)] | None = Field(
        default=None, description="nodes below which a job that shrinks waits; left out: half of them"
    )
    stall: Duration | None = Field(
        default=None, description="what a failure costs the other replicas; left out: simulated"
    )
    rejoin: Duration | None = Field(
        default=None, description="what a returning replica costs the others; left out: simulated"
    )
    least_replicas: Annotated[int, Field(gt=0, strict=True)] = Field(
        default=1, description="replicas below which training waits"
    )

    @field_validator("policy", mode="before")
    @classmethod
    def _reroutes_nothing(cls, value: Any) -> Any:
        if isinstance(value, str) and value.lower() in _REROUTING_SYSTEMS:
            raise NotSimulatedError(
                f"run.recovery.policy: '{value}' hands the work of a lost pipeline stage to its peers, which "
                "is not simulated; expected restart, shrink, in-process or per-step"
            )
        return value

    @model_validator(mode="after")
    def _fits_its_policy(self) -> Self:
        set_keys = self.model_fields_set
        for key in ("stall", "rejoin", "least_replicas"):
            if key in set_keys and self.policy != "per-step":
                raise ValueError(f"{key} has no effect with policy '{self.policy}'; it is for 'per-step'")
        if "least_nodes" in set_keys and self.policy != "shrink":
            raise ValueError(f"least_nodes has no effect with policy '{self.policy}'; it is for 'shrink'")
        for key in ("crash_detect", "hang_fraction", "hang_timeout"):
            if key in set_keys and self.detect is not None:
                raise ValueError(f"detect is for every failure, so {key} has no effect")
        return self
