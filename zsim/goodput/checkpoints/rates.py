"""Rates of the processor's part of saving and loading, and of starting, with their sources
(`zsim/presets/checkpoints.toml`)."""

from __future__ import annotations

from zsim.resources import PRESETS
from zsim.specs.cluster.files import read_toml
from zsim.specs.cluster.table import Fraction, Table
from zsim.units import BytesPerSecond, Duration

_FILE = "checkpoints.toml"


class SavingRates(Table):
    """Rates of one thread that saves or loads. `archive_bandwidth`, `unarchive_bandwidth`: of torch.save and
    torch.load between tensors and memory, `archive_seconds`, `unarchive_seconds` on top for each tensor;
    `file_bandwidth`: of torch.save into a file by name, which its C++ writes, to the page cache.
    `state_dict_seconds`: of a parameter and its states, until they are found; `staging_seconds`: of a tensor
    that is staged, beside its bytes.
    `planner_seconds_per_item`: what rank 0 takes for each item of each rank's plan of a save;
    `load_plan_seconds_per_item`: of a load, whose plans it passes on as they are;
    `own_load_plan_seconds_per_item`: what each rank takes for an item of its own when it loads;
    `metadata_seconds_per_chunk`: what each rank that loads takes for each chunk of `.metadata`, read and
    compared with its own. `interpreter_share`: of the interpreter, for a thread that another one competes
    with. `copy_bandwidth`: of host memory into new pages, on ranks that are processors."""

    archive_bandwidth: BytesPerSecond
    unarchive_bandwidth: BytesPerSecond
    archive_seconds: Duration
    unarchive_seconds: Duration
    file_bandwidth: BytesPerSecond
    state_dict_seconds: Duration
    staging_seconds: Duration
    planner_seconds_per_item: Duration
    load_plan_seconds_per_item: Duration
    own_load_plan_seconds_per_item: Duration
    metadata_seconds_per_chunk: Duration
    interpreter_share: Fraction
    copy_bandwidth: BytesPerSecond


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
    return SavingRates.model_validate(read_toml(PRESETS / _FILE)["saving"])


def starting_rates() -> StartingRates:
    return StartingRates.model_validate(read_toml(PRESETS / _FILE)["starting"])
