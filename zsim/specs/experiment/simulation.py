"""How a step is simulated: `[simulation]`.

[simulation]
every_micro_batch = false          # three, and so many times what the third added
known_to_fit = true                # it ran, so that torch's allocator had all memory of its GPU
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class SimulationTable(BaseModel):
    """`[simulation]`. `every_micro_batch`: false simulates three, and takes the others to be like the last of
    them; eight, and the others like their mean, where torch's allocator runs short. `known_to_fit`: torch's
    allocator is simulated wherever the tensors alone fit the GPU, as for a job that is known to have run;
    else only where `framework_memory.allocator_margin` is left too."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    every_micro_batch: bool = True
    known_to_fit: bool = False
