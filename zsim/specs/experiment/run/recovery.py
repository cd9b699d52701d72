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
_REROUTING = ("bamboo", "oobleck", "recycle", "parcae", "unicron", "swift", "trainmover")
_Count = Annotated[int, Field(ge=0, strict=True)]


class RecoveryTable(BaseModel):
    """`[run.recovery]`. `detect`: from a failure until all ranks have stopped; left out: `crash_detect`, and
    for the `hang_fraction` of failures that nobody reports `hang_timeout` (left out: the framework's own).
    `restart`: processes, communicators, compilation, first step; left out: simulated. `swap`: bringing a
    spare in. `policy`: "restart", all stop, failed nodes are replaced from `spares` or their repair is
    awaited; "shrink", without a spare training goes on with fewer nodes, down to `least_nodes`, at the same
    batch per GPU, and grows when nodes are back; "in-process", as restart, but processes stay, so that only
    communicators and loading are needed unless a node is lost; "per-step", the other replicas of HSDP go on
    after `stall` while one is away, and wait `rejoin` when it is back (torchft). `least_replicas`: of
    per-step."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, allow_inf_nan=False)

    policy: RecoveryPolicy = "restart"
    detect: Duration | None = None
    crash_detect: Duration = 30.0
    hang_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    hang_timeout: Duration | None = None
    restart: Duration | None = None
    swap: Duration = 60.0
    spares: _Count = 0
    least_nodes: Annotated[int, Field(gt=0, strict=True)] | None = None
    stall: Duration | None = None
    rejoin: Duration | None = None
    least_replicas: Annotated[int, Field(gt=0, strict=True)] = 1

    @field_validator("policy", mode="before")
    @classmethod
    def _reroutes_nothing(cls, value: Any) -> Any:
        if isinstance(value, str) and value.lower() in _REROUTING:
            raise NotSimulatedError(
                f"run.recovery.policy: '{value}' hands the work of a lost pipeline stage to its peers, which "
                "is not simulated; expected restart, shrink, in-process or per-step"
            )
        return value

    @model_validator(mode="after")
    def _fits_its_policy(self) -> Self:
        given = self.model_fields_set
        for key in ("stall", "rejoin", "least_replicas"):
            if key in given and self.policy != "per-step":
                raise ValueError(f"{key} has no effect with policy '{self.policy}'; it is for 'per-step'")
        if "least_nodes" in given and self.policy != "shrink":
            raise ValueError(f"least_nodes has no effect with policy '{self.policy}'; it is for 'shrink'")
        for key in ("crash_detect", "hang_fraction", "hang_timeout"):
            if key in given and self.detect is not None:
                raise ValueError(f"detect is for every failure, so {key} has no effect")
        return self
