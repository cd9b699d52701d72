"""`[data]`: how fast the hosts load samples.

    [data]
    samples_per_second_per_host = 40.0   # sequences that all loaders of a node deliver
    prefetch = true                      # during the previous step. false: the step waits for all of them

A loader that runs ahead delivers a step's samples during the previous step, so the step waits only for those
that are left. This is torch's DataLoader with workers, which loads `prefetch_factor` batches ahead. Full
queues smooth only the variation. Ranks of one model read the same samples. Each host loads those of the
replicas that it has a part of.
"""

from __future__ import annotations

from math import ceil
from typing import Annotated

from pydantic import Field, StrictBool

from zsim.specs.lazy_model import StrictTable
from zsim.specs.strategy.training import TrainingConfig


class DataTable(StrictTable):
    """`[data]`. If it is left out, samples are available when a step begins."""

    samples_per_second_per_host: Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)] | None = Field(
        default=None,
        description="samples that one host's loaders deliver; left out: data is never waited for",
    )
    prefetch: StrictBool = Field(default=True, description="samples are loaded during the previous step")


def waiting_seconds(
    table: DataTable, training: TrainingConfig, gpus_per_node: int, model_ranks: int, step_seconds: float
) -> float:
    """Seconds that a step of `step_seconds` waits for its samples.

    n / r - t with prefetch, but at least 0, and n / r without. n is the number of sequences that a host loads
    for a step, r its rate in sequences per second, and t the step's seconds.
    """
    if table.samples_per_second_per_host is None:
        return 0.0
    replicas = ceil(gpus_per_node / model_ranks)
    samples = replicas * training.micro_batch_size * training.gradient_accumulation_steps
    loading = samples / table.samples_per_second_per_host
    return max(0.0, loading - step_seconds) if table.prefetch else loading
