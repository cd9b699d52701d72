"""`[simulation]` of an experiment: how a step is simulated.

[simulation]
every_micro_batch = false          # simulate three; the others take as long as the third
known_to_fit = true                # the job ran, so torch's allocator had all memory of its GPU
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class SimulationTable(BaseModel):
    """`[simulation]`. `every_micro_batch`: false simulates three and takes the others to be like the third;
    if torch's allocator runs short, it simulates eight and takes the others to be like their mean.
    `known_to_fit`: torch's allocator is simulated whenever the tensors alone fit the GPU, as for a job that
    is known to have run; otherwise only if `framework_memory.allocator_margin` is free as well."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    every_micro_batch: bool = True
    known_to_fit: bool = False
