"""`[run.failures]` of an experiment: what fails, how often, and how many nodes each failure affects.

[run.failures]                      # or preset = "llama-3-405b", "rsc-1", ...
per_1000_node_days = 4.0            # nodes of 8 GPUs
law = "exponential"                 # weibull with a shape
planned_per_day = 0.0

[run.failures.causes.gpu]
share = 0.6
repair = "6 h"

`[run.recovery]` of an experiment: from a failure back to training.

[run.recovery]
detect = "10 min"
restart = "4 min"                   # left out: simulated
spares = 16
policy = "restart"                  # restart | shrink | in-process | per-step
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator

from zsim.errors import InputError, NotSimulatedError, did_you_mean
from zsim.files import PRESETS
from zsim.specs.cluster.files import read_toml
from zsim.specs.lazy_model import FiniteTable, Table
from zsim.specs.messages import raise_input_error
from zsim.units import Duration

_FILE = "failures.toml"
_Rate = Annotated[float, Field(ge=0)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Nodes = Annotated[int, Field(gt=0, strict=True)]
FailureLaw = Literal["exponential", "weibull"]
NODE_GPUS = 8  # of a node of `per_1000_node_days`


class CauseTable(FiniteTable):
    """`[run.failures.causes.NAME]`, with a share or a rate of its own."""

    share: _Rate | None = Field(
        default=None,
        description="weight among the causes, such as a count; left out: `per_1000_node_days`",
    )
    per_1000_node_days: _Rate | None = Field(
        default=None, description="rate of this cause; left out: `share`"
    )
    keeps_node: bool = Field(
        default=False, description="no node is replaced: processes or the machine restart"
    )
    nodes: _Nodes = Field(default=1, description="nodes that fail together")
    repair: Duration | None = Field(
        default=None, description="mean time until the node is back; left out: that of all failures"
    )
    repair_median: Duration | None = Field(
        default=None, description="median of lognormal repair times; left out: exponential"
    )
    detect: Duration | None = Field(
        default=None, description="time until detection; left out: that of [run.recovery]"
    )
    found_later: Duration | None = Field(
        default=None,
        description="silent corruption: time until detection; saves in between are lost; left out: none",
    )

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
    """`[run.failures]`. The law of repair is lognormal where its median is set, else exponential."""

    preset: str | None = Field(
        default=None,
        description="published fleet, changed by the other keys; left out: the other keys; without "
        'the table "typical"',
    )
    per_1000_node_days: _Rate | None = Field(
        default=None,
        description='interruptions per 1,000 days of 8 GPUs; left out: by `causes`, else as "typical"',
    )
    law: FailureLaw = Field(default="exponential", description="distribution of the time between failures")
    shape: Annotated[float, Field(ge=0.2, le=10)] | None = Field(
        default=None,
        description="shape of the Weibull law; below 1: bursts; left out: not used",
    )
    exponent: Annotated[float, Field(ge=0.5, le=3)] = Field(
        default=1.0,
        description="exponent of the rate's growth with GPUs, above `exponent_above_gpus`",
    )
    exponent_above_gpus: _Nodes = Field(
        default=32_768, description="GPUs up to which the rate grows in proportion"
    )
    ageing: tuple[tuple[_Rate, _Rate], ...] = Field(
        default=(), description="[day, factor] of the rate from that day on"
    )
    causes: dict[str, CauseTable] = Field(
        default_factory=dict,
        description="causes by name, each with its share or rate; left out: failures have no cause",
    )
    transient_fraction: _Share = Field(
        default=0.3, description="failures after which the same node goes on, where no causes are given"
    )
    rack_fraction: _Share = Field(
        default=0.0, description="failures of a node that take all nodes of its rack"
    )
    rack_nodes: _Nodes = Field(default=4, description="nodes of a rack")
    leaf_fraction: _Share = Field(
        default=0.0, description="failures of a node that take all nodes of its leaf switch"
    )
    leaf_nodes: _Nodes = Field(default=16, description="nodes of a leaf switch")
    repair: Duration = Field(default=6 * 3600.0, description="mean time until a node is back")
    repair_median: Duration | None = Field(
        default=3600.0,
        description="median of lognormal repair times; left out with `repair` given: exponential",
    )
    planned_per_day: _Rate = Field(default=0.0, description="planned stops, with a save first")
    planned_takes: Duration = Field(default=0.0, description="time of a planned stop")
    preemptions_per_day: _Rate = Field(default=0.0, description="how often all nodes are taken away (spot)")
    preemption_takes: Duration = Field(default=0.0, description="time until they are back")
    preemption_notice: Duration = Field(default=0.0, description="time from the warning until they are gone")
    stragglers_per_1000_node_days: _Rate = Field(
        default=0.0, description="how often a node is slower for a while"
    )
    straggler_slowdown: Annotated[float, Field(ge=1, le=100)] = Field(
        default=1.1, description="factor on the step with a slow node"
    )
    straggler_takes: Duration = Field(default=3600.0, description="how long a node stays slow")

    @model_validator(mode="before")
    @classmethod
    def _exponential_repair(cls, data: object) -> object:
        """A mean without a median belongs to an exponential law. The default's median belongs to the
        default's mean.
        """
        if isinstance(data, dict) and "repair" in data and "repair_median" not in data:
            return {**data, "repair_median": None}
        return data

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if (self.law == "weibull") != (self.shape is not None):
            raise ValueError("expected law 'weibull' with a shape, or 'exponential' without one")
        if self.repair_median is not None and self.repair_median > self.repair:
            raise ValueError("repair_median: the mean of a lognormal law, repair, is not below its median")
        if self.rack_fraction + self.leaf_fraction > 1:
            raise ValueError(
                "rack_fraction and leaf_fraction are parts of the failures; expected a sum of at most 1"
            )
        if [day for day, _ in self.ageing] != sorted({day for day, _ in self.ageing}):
            raise ValueError("ageing: expected [day, factor] in the order of days")
        has_rate = [cause.per_1000_node_days is not None for cause in self.causes.values()]
        if any(has_rate) and (not all(has_rate) or self.per_1000_node_days is not None):
            raise ValueError("causes have their own per_1000_node_days, all of them and without a total,"
                             " or a share each")  # fmt: skip
        if (
            self.causes
            and not any(has_rate)
            and not sum(cause.share or 0.0 for cause in self.causes.values())
        ):
            raise ValueError("causes: the shares are all 0; expected one above 0, or no causes")
        return self

    def total_per_1000_node_days(self) -> float:
        """The rate of all causes combined."""
        if self.per_1000_node_days is not None:
            return self.per_1000_node_days
        return sum(cause.per_1000_node_days or 0.0 for cause in self.causes.values())


def resolve_failures(table: FailuresTable | None) -> FailuresTable:
    """The table with its preset's numbers filled in.

    A table without any rate has the rate of preset "typical", and so has a missing table. Raises InputError
    for an unknown preset.
    """
    failures = apply_preset(table or FailuresTable(preset="typical"), _FILE, "run.failures")
    if failures.per_1000_node_days is None and not any(
        cause.per_1000_node_days is not None for cause in failures.causes.values()
    ):
        typical_failures = apply_preset(FailuresTable(preset="typical"), _FILE, "run.failures")
        failures = failures.model_copy(update={"per_1000_node_days": typical_failures.per_1000_node_days})
    return failures


_Preset = TypeVar("_Preset", bound=Table)


def apply_preset(table: _Preset, file: str, where: str) -> _Preset:
    """The table, with the numbers of the preset that it names for all keys that it leaves out.

    Keys that are set in addition to a preset make it "assumed". Raises InputError for an unknown preset.
    """
    name: str | None = getattr(table, "preset", None)
    if name is None:
        return table
    presets = read_toml(PRESETS / file)
    if name not in presets:
        raise InputError(
            f"{where}.preset: unknown '{name}'{did_you_mean(name, presets)}; expected one of "
            f"{', '.join(sorted(presets))}"
        )
    user_values = {key: getattr(table, key) for key in table.model_fields_set if key != "preset"}
    try:
        preset_table = type(table).model_validate(presets[name])
    except ValidationError as error:
        raise_input_error(error, file, type(table))
    if user_values:
        user_values.setdefault(
            "source", f"{preset_table.source}; changed by the user: {', '.join(sorted(user_values))}"
        )
        user_values.setdefault("evidence", "assumed")
    return preset_table.model_copy(update={**user_values, "preset": name})


RecoveryPolicy = Literal["restart", "shrink", "in-process", "per-step"]
_REROUTING_SYSTEMS = ("bamboo", "oobleck", "recycle", "parcae", "unicron", "swift", "trainmover")
_Count = Annotated[int, Field(ge=0, strict=True)]


class RecoveryTable(FiniteTable):
    """`[run.recovery]`.

    With policy "restart" all ranks stop, and failed nodes are replaced from `spares` or their repair is
    awaited. With "shrink", training without a spare goes on with fewer nodes at the same batch per GPU, and
    grows when nodes are back. "in-process" is like "restart", but processes stay, so that only communicators
    and loading are needed unless a node is lost. With "per-step" the other replicas of HSDP go on after
    `stall` while one is missing, and wait `rejoin` when it is back (torchft).
    """

    policy: RecoveryPolicy = Field(
        default="restart",
        description="all restart, fewer nodes continue, processes stay, or other replicas continue (torchft)",
    )
    detect: Duration | None = Field(
        default=None,
        description="time from a failure until all ranks have stopped; left out: by crash or hang",
    )
    crash_detect: Duration = Field(default=30.0, description="time until a crash is noticed")
    hang_fraction: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.1, description="failures that nobody reports: ranks wait for a collective"
    )
    hang_timeout: Duration | None = Field(
        default=None, description="time until such a collective gives up; left out: the framework's own"
    )
    restart: Duration | None = Field(
        default=None,
        description="time of processes, communicators, compilation, first step; left out: simulated",
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
