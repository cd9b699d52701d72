"""The optimizers that `training.optimizer` names, with the library of each and the frameworks that take it.

The states that they keep and move are in `zsim.cost.optimizers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from zsim.errors import InputError, NotSimulatedError, did_you_mean

Launches = Literal["per list", "per tensor"]
# "torch": fused, foreach or a loop; "deepspeed": on the GPU and, under offload, on the CPU.
Library = Literal["torch", "deepspeed", "transformer-engine", "bitsandbytes", "torchao", "transformers"]


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer that `training.optimizer` names."""

    name: str
    library: Library
    source: str
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
    needs_shapes: bool = False
    """It treats matrices otherwise than vectors."""
    in_deepspeed: bool = False
    """ZeRO takes it without `zero_allow_untested_optimizer`."""

    @property
    def is_torch_list(self) -> bool:
        """Whether torch has it fused, foreach and as a loop."""
        return self.library == "torch" and self.launches == "per list"


_BNB, _AO = "bitsandbytes 0.50.2", "torchao 0.18.0"
_OPTIMIZERS = (
    Optimizer("adamw", "torch", "torch 2.13", 2, "per list", in_deepspeed=True),
    Optimizer("adam", "torch", "torch 2.13", 2, "per list", in_deepspeed=True),
    Optimizer("sgd", "torch", "torch 2.13", 0, "per list"),
    Optimizer("sgd_momentum", "torch", "torch 2.13", 1, "per list"),
    Optimizer("adagrad", "deepspeed", "torch 2.13, DeepSpeedCPUAdagrad 0.19.8", 1, in_deepspeed=True),
    Optimizer("lion", "deepspeed", "DeepSpeed 0.19.8 FusedLion", 1, "per list", in_deepspeed=True),
    Optimizer("adamw-bf16", "transformer-engine", "Transformer Engine 2.17 FusedAdam", None, "per list"),
    Optimizer("adamw-8bit", "bitsandbytes", _BNB, waits_per_tensor=True),
    Optimizer("lion-8bit", "bitsandbytes", _BNB, waits_per_tensor=True),
    Optimizer("paged-adamw", "bitsandbytes", _BNB, waits_per_tensor=True, is_paged=True),
    Optimizer("paged-adamw-8bit", "bitsandbytes", _BNB, waits_per_tensor=True, is_paged=True),
    Optimizer("adamw-8bit-torchao", "torchao", _AO, rounds_stochastically=True),
    Optimizer("adamw-4bit-torchao", "torchao", _AO, rounds_stochastically=True),
    Optimizer("adamw-fp8-torchao", "torchao", _AO, rounds_stochastically=True),
    Optimizer("adafactor", "torch", "torch 2.13", needs_shapes=True),
    Optimizer("adafactor-transformers", "transformers", "transformers 5.23", needs_shapes=True),
    Optimizer(
        "muon",
        "torch",
        "torch 2.13, AdamW for all but matrices; DeepSpeed 0.19.8 and Megatron-Core 0.16 their own",
        needs_shapes=True,
        in_deepspeed=True,
    ),
)
OPTIMIZERS: Mapping[str, Optimizer] = {optimizer.name: optimizer for optimizer in _OPTIMIZERS}

# Optimizers that people name and zsim does not simulate, and why.
REFUSED: Mapping[str, str] = {
    "shampoo": "its preconditioners' roots are computed every so many steps, in ways that differ by library",
    "soap": "its eigenbases are renewed every so many steps by a QR of every factor",
    "lamb": "it takes norms of every tensor between two passes, which are not counted yet",
    "onebitadam": "its 1-bit all-reduce comes after a warm-up of full steps",
    "zerooneadam": "its 1-bit all-reduce comes in intervals that grow",
    "onebitlamb": "its 1-bit all-reduce comes after a warm-up of full steps",
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
