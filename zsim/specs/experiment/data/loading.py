"""`[data]`: how fast the hosts load samples.

    [data]
    samples_per_second_per_host = 40.0   # sequences that the loaders of a node deliver together
    prefetch = true                      # while the step before runs; false: the step waits for all of them

A loader that runs ahead delivers a step's samples in the time of the step before: the step waits for what is
left (torch's DataLoader with workers, `prefetch_factor` batches ahead; queues that are full level out only
what varies). Ranks of one model read the same samples; each host loads those of the replicas that it has a
part of.
"""

from __future__ import annotations

from math import ceil
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from zsim.specs.strategy.training import Training


class DataTable(BaseModel):
    """`[data]`. Left out, samples are there when a step begins."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    samples_per_second_per_host: Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)] | None = Field(
        default=None,
        description="samples that the loaders of one host make ready; left out: no step waits for data",
    )
    prefetch: StrictBool = Field(default=True, description="samples are loaded beside the step before")


def waiting_seconds(
    table: DataTable, training: Training, gpus_per_node: int, model_ranks: int, step_seconds: float
) -> float:
    """Seconds that a step of `step_seconds` waits for its samples: n / r - t, with prefetch, else n / r.

    n: sequences that a host loads for a step; r: its rate; t: the step.
    """
    if table.samples_per_second_per_host is None:
        return 0.0
    replicas = ceil(gpus_per_node / model_ranks)
    samples = replicas * training.micro_batch_size * training.gradient_accumulation_steps
    loading = samples / table.samples_per_second_per_host
    return max(0.0, loading - step_seconds) if table.prefetch else loading
