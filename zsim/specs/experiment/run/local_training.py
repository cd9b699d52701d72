"""`[run.local]` of an experiment: replicas that train independently and synchronize every so many steps.

[run.local]
method = "diloco"                   # diloco | local-sgd
replicas = 8
every = 40                          # inner steps from one synchronization to the next
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_Count = Annotated[int, Field(gt=0, strict=True)]


class LocalTrainingTable(BaseModel):
    """`[run.local]`.

    In method "local-sgd" parameters are averaged, and all replicas wait (Stich 2019, arXiv 1805.09767). In
    "diloco" the change since the last synchronization is averaged and given to an outer optimizer (Douillard
    et al. 2023, arXiv 2311.08105). This happens one fragment at a time, concurrently with `delay` inner steps
    (Streaming DiLoCo, arXiv 2501.18512, and torchft 73dafea local_sgd.py).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    method: Literal["diloco", "local-sgd"] = Field(
        default="diloco", description="what is averaged: changes, for an outer optimizer, or parameters"
    )
    replicas: Annotated[int, Field(gt=1, strict=True)] = Field(
        description="groups of nodes that train apart, each with the experiment's strategy"
    )
    every: _Count = Field(default=40, description="inner steps in which every parameter is averaged once")
    fragments: _Count = Field(default=1, description="parts of the model that take turns (diloco)")
    delay: Annotated[int, Field(ge=0, strict=True)] = Field(
        default=0, description="inner steps that a fragment's averaging may take beside them (diloco)"
    )

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.every % self.fragments:
            raise ValueError("every: expected a multiple of fragments, which take turns at equal distances")
        if self.delay >= self.every // self.fragments:
            raise ValueError("delay: expected fewer steps than from one fragment's averaging to the next")
        if self.method == "local-sgd" and (self.fragments > 1 or self.delay):
            raise ValueError("fragments and delay are of 'diloco'; 'local-sgd' averages all at once")
        return self
