"""`[simulation]` of an experiment: how a step is simulated.

[simulation]
every_micro_batch = false          # simulate three. The others take as long as the third
known_to_fit = true                # the job ran, so torch's allocator had all memory of its GPU
"""

from __future__ import annotations

from pydantic import Field

from zsim.specs.lazy_model import StrictTable


class SimulationTable(StrictTable):
    """`[simulation]`.

    Where not every micro-batch is simulated and torch's allocator runs short, eight are simulated, and the
    others are assumed to equal their mean. A job that is not known to fit also needs
    `framework_memory.allocator_margin` free before the allocator is simulated, and so does one that is known
    to fit with expandable segments, which leave no gaps: that it ran says that its tensors are overestimated.
    """

    every_micro_batch: bool = Field(
        default=True,
        description="false: three micro-batches are simulated, and the others taken to be like the third",
    )
    known_to_fit: bool = Field(
        default=False,
        description="the job is known to have run, so torch's allocator is given all memory of its GPU",
    )
