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
    """Seconds of one process for an item of a plan or of `.metadata`."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    read_item: Duration
    """Rank 0 reads an item of any rank's plan of a save."""
    plan_item: Duration
    """Rank 0 makes the items one plan."""
    answer_item: Duration
    """Rank 0 sends an item back."""
    commit_item: Duration
    """Rank 0 handles where an item was written, and its line in `.metadata`."""
    load_item: Duration
    """Rank 0 reads an item of a load's plan and sends it back as it is."""
    metadata_item: Duration
    """Every rank that loads reads all of `.metadata` and looks for its parts."""

    def scale_to_core(self, factor: float) -> PlanningRates:
        """The rates of a core that is `factor` times as slow."""
        return self.model_copy(update={name: factor * seconds for name, seconds in self})


class SavingRates(Table):
    """Rates of one thread that saves or loads."""

    archive_bandwidth: BytesPerSecond
    """torch.save between tensors and memory."""
    unarchive_bandwidth: BytesPerSecond
    """torch.load between tensors and memory."""
    archive_seconds: Duration
    """On top of the bytes, for each tensor that torch.save archives."""
    unarchive_seconds: Duration
    """On top of the bytes, for each tensor that torch.load reads."""
    file_bandwidth: BytesPerSecond
    """torch.save into a file by name, which its C++ writes, to the page cache."""
    state_dict_seconds: Duration
    """The search for a parameter and its states."""
    staging_seconds: Duration
    """For each tensor that is staged, on top of its bytes."""
    own_load_plan_seconds_per_item: Duration
    """Planning the load of an item of a rank and looking it up."""
    planning_wait: Duration
    """The wait of a thread that launches kernels, per launch, for the interpreter while another thread of the
    process plans.
    """
    archiving_wait: Duration
    """The same, while another thread makes archives."""
    copy_bandwidth: BytesPerSecond
    """Host memory into new pages, on ranks that are processors."""
    planning: PlanningRates
    planning_uncollected: PlanningRates
    """The planner's rates where Python does not look for cycles of objects."""

    def scale_to_core(self, factor: float) -> SavingRates:
        """The rates of a core that is `factor` times as slow. Waits for turns are no work and stay."""
        slower = {name: getattr(self, name) / factor for name in _CORE_BANDWIDTHS}
        slower |= {name: getattr(self, name) * factor for name in _CORE_SECONDS}
        plans = {
            name: getattr(self, name).scale_to_core(factor) for name in ("planning", "planning_uncollected")
        }
        return self.model_copy(update=slower | plans)


_CORE_BANDWIDTHS = ("archive_bandwidth", "unarchive_bandwidth", "file_bandwidth", "copy_bandwidth")
_CORE_SECONDS = (
    "archive_seconds", "unarchive_seconds", "state_dict_seconds", "staging_seconds",
    "own_load_plan_seconds_per_item",
)  # fmt: skip


class StartingRates(Table):
    """Times of a start. `communicator_seconds` at `communicator_ranks` grows with ranks to the power
    `communicator_exponent`, and is at least `communicator_least`.
    """

    process: Duration
    """Launch to model, without the image."""
    communicator_seconds: Duration
    communicator_ranks: int
    communicator_exponent: float
    communicator_least: Duration
    compile: Duration
    """torch.compile without a cache."""
    first_steps: float
    """The number of steps' times that the first one takes."""


def saving_rates() -> SavingRates:
    """The rates on the reference core, that of `frameworks.toml`."""
    return SavingRates.model_validate(read_toml(PRESETS / _FILE)["saving"])


def starting_rates() -> StartingRates:
    return StartingRates.model_validate(read_toml(PRESETS / _FILE)["starting"])
