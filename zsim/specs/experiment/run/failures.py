"""`[run.failures]` of an experiment: what fails how often, and what it takes along.

[run.failures]                      # or preset = "llama-3-405b", "rsc-1", ...
per_1000_node_days = 4.0            # nodes of 8 GPUs
law = "exponential"                 # weibull with a shape
planned_per_day = 0.0

[run.failures.causes.gpu]
share = 0.6
repair = "6 h"
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from zsim.specs.cluster.table import Table
from zsim.specs.experiment.run.presets import with_preset
from zsim.units import Duration

_FILE = "failures.toml"
_Rate = Annotated[float, Field(ge=0)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Nodes = Annotated[int, Field(gt=0, strict=True)]
FailureLaw = Literal["exponential", "weibull"]
NODE_GPUS = 8  # of a node of `per_1000_node_days`


class CauseTable(BaseModel):
    """`[run.failures.causes.NAME]`. `share`: weight among the causes (a count will do); or
    `per_1000_node_days`. `keeps_node`: the processes or the machine start again, nothing is replaced; else
    the node goes into `repair` (mean; with `repair_median` lognormal, else exponential). `nodes`: that go
    together. `detect`: until it is noticed. `found_later`: silent corruption; all that is saved between is
    bad."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, allow_inf_nan=False)

    share: _Rate | None = None
    per_1000_node_days: _Rate | None = None
    keeps_node: bool = False
    nodes: _Nodes = 1
    repair: Duration | None = None
    repair_median: Duration | None = None
    detect: Duration | None = None
    found_later: Duration | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if (self.share is None) == (self.per_1000_node_days is None):
            raise ValueError("expected share or per_1000_node_days, one of them")
        if self.keeps_node and (self.repair is not None or self.nodes > 1):
            raise ValueError("keeps_node: nothing is repaired, so repair and nodes have no effect")
        if self.repair_median is not None and self.repair_median > (self.repair or 0.0):
            raise ValueError("repair_median has an effect with a repair (the mean) above it")
        return self


class FailuresTable(Table):
    """`[run.failures]`. `per_1000_node_days`: interruptions per 1,000 days of a node of 8 GPUs; other nodes
    count by their GPUs. `law`: of the time between two of them; weibull starts anew with each. `exponent`:
    the rate grows with GPUs to this power above `exponent_above_gpus`. `ageing`: [day, factor] of the rate
    from that day on. `transient_fraction`: after so many the same node goes on, where no causes are given.
    `rack_fraction`, `leaf_fraction`: of the failures that cost a node, how many take all nodes of a rack, of
    a leaf switch. `repair`, `repair_median`: of a node. `planned_...`: regular stops with a save first.
    `preemptions_per_day`: all nodes are taken away, `preemption_notice` before, for `preemption_takes`.
    `stragglers_...`: nodes that are slower for a while, and the step with them."""

    preset: str | None = None
    per_1000_node_days: _Rate | None = None
    law: FailureLaw = "exponential"
    shape: Annotated[float, Field(ge=0.2, le=10)] | None = None
    exponent: Annotated[float, Field(ge=0.5, le=3)] = 1.0
    exponent_above_gpus: _Nodes = 32_768
    ageing: tuple[tuple[_Rate, _Rate], ...] = ()
    causes: dict[str, CauseTable] = Field(default_factory=dict)
    transient_fraction: _Share = 0.3
    rack_fraction: _Share = 0.0
    rack_nodes: _Nodes = 4
    leaf_fraction: _Share = 0.0
    leaf_nodes: _Nodes = 16
    repair: Duration = 6 * 3600.0
    repair_median: Duration | None = 3600.0
    planned_per_day: _Rate = 0.0
    planned_takes: Duration = 0.0
    preemptions_per_day: _Rate = 0.0
    preemption_takes: Duration = 0.0
    preemption_notice: Duration = 0.0
    stragglers_per_1000_node_days: _Rate = 0.0
    straggler_slowdown: Annotated[float, Field(ge=1, le=100)] = 1.1
    straggler_takes: Duration = 3600.0

    @model_validator(mode="before")
    @classmethod
    def _exponential_repair(cls, data: object) -> object:
        """A mean alone is of an exponential law: the default's median belongs to the default's mean."""
        if isinstance(data, dict) and "repair" in data and "repair_median" not in data:
            return {**data, "repair_median": None}
        return data

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if (self.law == "weibull") != (self.shape is not None):
            raise ValueError("a weibull law has a shape, an exponential one has none")
        if self.repair_median is not None and self.repair_median > self.repair:
            raise ValueError("repair_median: the mean of a lognormal law, repair, is not below its median")
        if self.rack_fraction + self.leaf_fraction > 1:
            raise ValueError(
                "rack_fraction and leaf_fraction are parts of the failures; their sum is above 1"
            )
        if [day for day, _ in self.ageing] != sorted({day for day, _ in self.ageing}):
            raise ValueError("ageing: expected [day, factor] in the order of days")
        rated = [cause.per_1000_node_days is not None for cause in self.causes.values()]
        if any(rated) and (not all(rated) or self.per_1000_node_days is not None):
            raise ValueError("causes have their own per_1000_node_days, all of them and without a total,"
                             " or a share each")  # fmt: skip
        if self.causes and not any(rated) and not sum(one.share or 0.0 for one in self.causes.values()):
            raise ValueError("causes: the shares are all 0")
        return self

    def total_per_1000_node_days(self) -> float:
        """The rate of all causes together."""
        if self.per_1000_node_days is not None:
            return self.per_1000_node_days
        return sum(cause.per_1000_node_days or 0.0 for cause in self.causes.values())


def resolve_failures(table: FailuresTable | None) -> FailuresTable:
    """The table with its preset's numbers filled in; a table without any rate, and no table, has the rate of
    preset "typical". Raises InputError for an unknown preset."""
    found = with_preset(table or FailuresTable(preset="typical"), _FILE, "run.failures")
    if found.per_1000_node_days is None and not any(
        cause.per_1000_node_days is not None for cause in found.causes.values()
    ):
        typical = with_preset(FailuresTable(preset="typical"), _FILE, "run.failures")
        found = found.model_copy(update={"per_1000_node_days": typical.per_1000_node_days})
    return found
