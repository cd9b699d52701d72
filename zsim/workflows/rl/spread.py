"""The intervals of 80 % of an RL step and of its phases, by errors of published ones.

Each end is one of split conformal prediction: of n factors in order, that of place 0.9 (n + 1), or the last
where there are too few. Only rows to which constants may be fitted are counted, so that rows that are there
to report errors tell whether the intervals hold (validation/rl/README.md). Constants of steps, trainers and
rollouts were fitted to the same rows, which then lie about as often on either side: the larger factor is for
both ends.
`python -m validation.rl.calibration` prints the factors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class PhaseSpread(NamedTuple):
    """Factors from what is simulated to the ends of its interval."""

    below: float
    """What is simulated, over the least that is to be expected."""
    above: float
    """The most that is to be expected, over what is simulated."""

    def range_of(self, seconds: float) -> tuple[float, float]:
        """The interval about `seconds`."""
        return seconds / self.below, seconds * self.above


STEP = PhaseSpread(1.33, 1.33)
"""13 steps, of NeMo-RL and of verl."""
PASSES = STEP
"""21 phases of verl's trainer are within a factor of 1.18, all of one source, so that a step's is taken."""
ROLLOUT = PhaseSpread(1.26, 1.26)
"""Seven rollouts of verl."""
_COPIED = PhaseSpread(1.57, 4.4)
SYNCS: Mapping[str, PhaseSpread] = {
    "ipc": _COPIED,
    "broadcast": _COPIED,
    "filesystem": _COPIED,
    "reshard": PhaseSpread(1.51, 1.34),
    "host": PhaseSpread(1.14, 1.13),
}
"""By transport: 22 syncs by handles or broadcasts of several releases of verl, 13 of NeMo-RL from shard to
shard, 6 of checkpoint-engine from host memory. A file system, of which there are none, is as the first."""


def phase_spread(phase: str, transport: str) -> PhaseSpread:
    """The spread of a phase. Those without published times have the step's."""
    if phase == "weight_sync":
        return SYNCS[transport]
    if phase in ("training", "old_logprobs", "reference", "values"):
        return PASSES
    return ROLLOUT if phase == "rollout" else STEP
