"""The optimizers that `training.optimizer` names, with the library of each (`presets/optimizers.toml`).

The states that they keep and move are in `zsim.cost.optimizers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from zsim.errors import InputError, NotSimulatedError, did_you_mean
from zsim.files import preset_table

Launches = Literal["per list", "per tensor"]


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer that `training.optimizer` names."""

    name: str
    library: str
    """Its library, of which torch has some fused, foreach and as a loop."""
    source: str
    """The library and the release whose code it is, in sentences."""
    moments: int | None = None
    """Values per parameter that it keeps, for frameworks that choose their type. None if its states have a
    type or a shape of their own.
    """
    launches: Launches = "per tensor"
    """A kernel for a list of tensors, or one per tensor."""
    waits_per_tensor: bool = False
    """The host waits for the GPU after every tensor."""
    is_paged: bool = False
    """States of 100,000 elements or more are unified memory."""
    rounds_stochastically: bool = False
    """It can write 16-bit weights with stochastic rounding."""
    strategy: str = ""
    """The only strategy that has it, for one that reduces gradients itself."""

    @property
    def is_torch_list(self) -> bool:
        """Whether torch has it fused, foreach and as a loop."""
        return self.library == "torch" and self.launches == "per list"


OPTIMIZERS: Mapping[str, Optimizer] = {
    row["name"]: Optimizer(**row) for row in preset_table("optimizers")["optimizer"]
}

# Optimizers that people name and zsim does not simulate, and why.
REFUSED: Mapping[str, str] = {
    "shampoo": "its preconditioners' roots are computed every so many steps, in ways that differ by library",
    "soap": "its eigenbases are renewed every so many steps by a QR of every factor",
    "lamb": "it takes norms of every tensor between two passes, which are not counted yet",
    "galore": "it projects gradients onto bases that an SVD renews every so many steps",
    "sophia": "it estimates a Hessian every so many steps",
}


def optimizer_of(name: str) -> Optimizer:
    """The optimizer called `name`.

    Raises NotSimulatedError for one that is known and not simulated, and InputError for a name that is none.
    """
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    expected = f"expected one of {', '.join(OPTIMIZERS)}"
    if (reason := REFUSED.get(name.lower().replace("-", "").replace("_", ""))) is not None:
        raise NotSimulatedError(f"training.optimizer: '{name}' is not simulated: {reason}; {expected}")
    raise InputError(f"training.optimizer: found '{name}'{did_you_mean(name, OPTIMIZERS)}; {expected}")
