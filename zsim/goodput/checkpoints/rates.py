"""Rates of the processor's part of saving and loading, and of starting, with their sources
(`zsim/presets/checkpoints.toml`)."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from zsim.resources import PRESETS
from zsim.specs.cluster.files import read_toml
from zsim.specs.cluster.table import Table
from zsim.units import BytesPerSecond, Duration

_FILE = "checkpoints.toml"


class PlanningRates(BaseModel):
    """Seconds of one process for an item of a plan or of `.metadata`. `read_item`, `plan_item`,
    `answer_item`: of rank 0 for an item of any rank's plan of a save, which it reads, makes one plan of, and
    sends back; `commit_item`: of where it was written, and its line in `.metadata`; `load_item`: of a plan
    of a load, which it reads and sends back as it is. `metadata_item`: of every rank that loads, which reads
    all of `.metadata` and looks for its parts."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    read_item: Duration
    plan_item: Duration
    answer_item: Duration
    commit_item: Duration
    load_item: Duration
    metadata_item: Duration

    def on_core(self, factor: float) -> PlanningRates:
        """The rates of a core that is `factor` times as slow."""
        return self.model_copy(update={name: factor * seconds for name, seconds in self})


class SavingRates(Table):
    """Rates of one thread that saves or loads. `archive_bandwidth`, `unarchive_bandwidth`: of torch.save and
    torch.load between tensors and memory, `archive_seconds`, `unarchive_seconds` on top for each tensor;
    `file_bandwidth`: of torch.save into a file by name, which its C++ writes, to the page cache.
    `state_dict_seconds`: of a parameter and its states, until they are found; `staging_seconds`: of a tensor
    that is staged, beside its bytes; `own_load_plan_seconds_per_item`: of an
    item of a rank, to plan its load and to look it up.
    `planning_wait`, `archiving_wait`: of a thread that launches kernels, per launch, for the interpreter
    while another thread of the process plans, or makes archives. `copy_bandwidth`: of host memory into new
    pages, on ranks that are processors. `planning_uncollected`: where Python does not look for cycles of
    objects."""

    archive_bandwidth: BytesPerSecond
    unarchive_bandwidth: BytesPerSecond
    archive_seconds: Duration
    unarchive_seconds: Duration
    file_bandwidth: BytesPerSecond
    state_dict_seconds: Duration
    staging_seconds: Duration
    own_load_plan_seconds_per_item: Duration
    planning_wait: Duration
    archiving_wait: Duration
    copy_bandwidth: BytesPerSecond
    planning: PlanningRates
    planning_uncollected: PlanningRates

    def on_core(self, factor: float) -> SavingRates:
        """The rates of a core that is `factor` times as slow; waits for turns are no work."""
        slower = {name: getattr(self, name) / factor for name in _CORE_BANDWIDTHS}
        slower |= {name: getattr(self, name) * factor for name in _CORE_SECONDS}
        plans = {name: getattr(self, name).on_core(factor) for name in ("planning", "planning_uncollected")}
        return self.model_copy(update=slower | plans)


_CORE_BANDWIDTHS = ("archive_bandwidth", "unarchive_bandwidth", "file_bandwidth", "copy_bandwidth")
_CORE_SECONDS = (
    "archive_seconds", "unarchive_seconds", "state_dict_seconds", "staging_seconds",
    "own_load_plan_seconds_per_item",
)  # fmt: skip


class StartingRates(Table):
    """Times of a start. `process`: launch to model, without the image. `communicator_seconds` at
    `communicator_ranks`, growing with ranks to the power `communicator_exponent`, at least
    `communicator_least`. `compile`: torch.compile without a cache; `first_steps`: steps' time that the first
    one takes."""

    process: Duration
    communicator_seconds: Duration
    communicator_ranks: int
    communicator_exponent: float
    communicator_least: Duration
    compile: Duration
    first_steps: float


def saving_rates() -> SavingRates:
    """The rates on the reference core, that of `frameworks.toml`."""
    return SavingRates.model_validate(read_toml(PRESETS / _FILE)["saving"])


def starting_rates() -> StartingRates:
    return StartingRates.model_validate(read_toml(PRESETS / _FILE)["starting"])
