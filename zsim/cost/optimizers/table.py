"""What every optimizer keeps and moves.

An update in one pass reads and writes the parameter and every state, and reads the gradient: fused AdamW 28
bytes per parameter in fp32. `EXTRA` counts what goes beyond that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zsim.cost.optimizers import states
from zsim.cost.optimizers.states import StateRule
from zsim.cost.optimizers.tensors import Updated
from zsim.specs.strategy.optimizers import OPTIMIZERS, optimizer_of

_OWN: dict[str, StateRule] = {
    "adamw-bf16": states.in_type(2, "bf16"),  # exp_avg_dtype, exp_avg_sq_dtype = torch.bfloat16
    "adamw-8bit": states.bitsandbytes_8bit(2),
    "lion-8bit": states.bitsandbytes_8bit(1),
    "paged-adamw": states.in_type(2, "fp32"),
    "paged-adamw-8bit": states.bitsandbytes_8bit(2),
    "adamw-8bit-torchao": states.torchao(8, 256, 1024),
    "adamw-4bit-torchao": states.torchao(4, 128, 64),
    "adamw-fp8-torchao": states.torchao(8, 256, 0),
    "adafactor": states.factored(),
    "adafactor-transformers": states.factored("fp32"),
    "muon": states.momentum_of_matrices,
}
STATES: Mapping[str, StateRule] = _OWN | {
    name: states.in_stored_type(one.moments) for name, one in OPTIMIZERS.items() if one.moments is not None
}

# (passes over a tensor in its type, readings of its gradient, kernels per tensor) on top of one pass.
# torch 2.13 optim/_adafactor.py `_single_tensor_adafactor`, of a matrix: norm of p (reads 1); two norms of
# the gradient (reads it twice); product of row and column (writes 1); div_, clamp_, rsqrt_ (2 each), mul_ by
# the gradient (2, and one more reading of it); norm of the update (1); its reading by the scaled add (1).
# transformers 5.23 optimization.py `Adafactor.step`, of a matrix with its defaults: the gradient squared, eps
# added (2 + 2), two means (2), product of the factors (1), times the gradient (2, and one more reading of
# it), its root mean square (1), div_ and mul_ (2 + 2), that of p (1), the add's reading of the update (1).
EXTRA: Mapping[str, tuple[int, int, int]] = {
    "adafactor": (11, 2, 14),
    "adafactor-transformers": (16, 1, 18),
}


def state_tensors(name: str, tensors: Sequence[Updated], dtype: str = "fp32") -> tuple[int, ...]:
    """Bytes of every state tensor for `tensors`, in order; `dtype`: the type the parameters are stored in.

    Raises what `optimizer_of` raises.
    """
    rule = STATES[optimizer_of(name).name]
    return tuple(size for tensor in tensors for size in rule(tensor, dtype) if size)
