"""The state tensors that an optimizer makes for one tensor, and the kernels of an update.

All rules for the bytes of states are functions of the tensor's part on the rank (`UpdatedTensor`) and of the
type it is stored in. Scalars (the step's number, 4 bytes a tensor) are left out.

An update in one pass reads and writes the parameter and every state, and reads the gradient: fused AdamW 28
bytes per parameter in fp32. `EXTRA` counts what goes beyond that.

# [Note: Newton-Schulz]
Muon's products, and the work of one matrix's update: torch 2.13 optim/_muon.py `_single_tensor_muon` and
`_zeropower_via_newtonschulz`: momentum, its Nesterov sum, a cast to bf16, a norm and a division, then five
rounds of

    A = X X^T
    B = b A + c A A
    X = a X + B X

of an m x n matrix with m <= n (a tall one is transposed before), so 5 (4 m^2 n + 2 m^3) FLOPs in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Self

from zsim.cost.kernels.kernel import Kernel
from zsim.cost.kernels.update import OptimizerImplementation, cast_kernels, optimizer_kernels
from zsim.dtypes import DTYPE_BYTES
from zsim.specs.strategy.optimizers import OPTIMIZERS, optimizer_of


@dataclass(frozen=True, slots=True)
class UpdatedTensor:
    """A tensor's part on a rank."""

    shape: tuple[int, ...]
    """The shape of the part. Flat parts are vectors."""
    full_shape: tuple[int, ...] = ()
    """The shape of the full tensor."""
    is_matrix: bool = False
    """A weight of a hidden layer, for optimizers that treat those differently (Muon): two dimensions, and
    neither an embedding nor the head.
    """
    dtype: str = ""
    """The type of the parameter, its gradient and its states. Empty for that of all."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @classmethod
    def flat(cls, numels: Iterable[int]) -> list[Self]:
        """Vectors of `numels` elements, as flattening frameworks give them to the optimizer."""
        return [cls((numel,)) for numel in numels]


StateRule = Callable[[UpdatedTensor, str], tuple[int, ...]]

_SMALLEST_QUANTISED = 4096  # elements; bitsandbytes `min_8bit_size`, torchao `_new_buffer`
_FP32 = 4


def stored_type_states(count: int) -> StateRule:
    """`count` tensors like the parameter, in its type: torch.optim's moments."""

    def rule(tensor: UpdatedTensor, dtype: str) -> tuple[int, ...]:
        return (tensor.numel * DTYPE_BYTES[dtype],) * count

    return rule


def typed_states(count: int, state_dtype: str) -> StateRule:
    """`count` tensors like the parameter, in a type of their own."""

    def rule(tensor: UpdatedTensor, dtype: str) -> tuple[int, ...]:
        return (tensor.numel * DTYPE_BYTES[state_dtype],) * count

    return rule


def bitsandbytes_8bit(count: int) -> StateRule:
    """`count` moments of a byte an element and, per block of 256 elements, an fp32 maximum. Below 4,096
    elements they are fp32. The two quantisation maps are one for all tensors (1 KiB each, left out).

    Source: bitsandbytes 0.50.2 optim/optimizer.py, `Optimizer2State.init_state`, `Optimizer1State.init_state`
    (Dettmers et al. 2022, arXiv 2110.02861).
    """

    def rule(tensor: UpdatedTensor, dtype: str) -> tuple[int, ...]:
        numel = tensor.numel
        if numel < _SMALLEST_QUANTISED:
            return (numel * _FP32,) * count
        return (numel, ceil(numel / 256) * _FP32) * count

    return rule


def torchao(bits: int, block: int, map_bytes: int) -> StateRule:
    """Two moments of `bits` bits an element, each with an fp32 scale per `block` elements and a quantisation
    map of its own. A part of fewer than 4,096 elements, or one that the block does not divide, stays in the
    parameter's type.

    Source: torchao 0.18.0 optim/adam.py `_AdamBase._new_buffer`, subclass_8bit.py, subclass_4bit.py,
    subclass_fp8.py.
    """

    def rule(tensor: UpdatedTensor, dtype: str) -> tuple[int, ...]:
        numel = tensor.numel
        if numel < _SMALLEST_QUANTISED or numel % block:
            return (numel * DTYPE_BYTES[dtype],) * 2
        moment_sizes = (numel * bits // 8, numel // block * _FP32, map_bytes)
        return tuple(size for size in moment_sizes if size) * 2

    return rule


def factored(state_dtype: str | None = None) -> StateRule:
    """A row and a column of the second moment (Shazeer and Stern 2018, arXiv 1804.04235, section 3), over the
    last two dimensions. A vector has the full second moment. They are in the gradient's type, or in
    `state_dtype`.

    Source: torch 2.13 optim/_adafactor.py `_init_group` (the gradient's type); transformers 5.23
    optimization.py `Adafactor.step` (fp32).
    """

    def rule(tensor: UpdatedTensor, dtype: str) -> tuple[int, ...]:
        element, shape = DTYPE_BYTES[state_dtype or dtype], tensor.shape
        if len(shape) < 2:
            return (tensor.numel * element,)
        return prod(shape[:-1]) * element, prod((*shape[:-2], shape[-1])) * element

    return rule


def momentum_of_matrices(tensor: UpdatedTensor, dtype: str) -> tuple[int, ...]:
    """Muon: a momentum for a matrix, AdamW's two moments for every other tensor.

    Source: torch 2.13 optim/_muon.py `_init_group`. Its documentation leaves vectors, embeddings and the head
    to AdamW.
    """
    return (tensor.numel * DTYPE_BYTES[dtype],) * (1 if tensor.is_matrix else 2)


_RULES: dict[str, StateRule] = {
    "adamw-bf16": typed_states(2, "bf16"),  # exp_avg_dtype, exp_avg_sq_dtype = torch.bfloat16
    "adamw-8bit": bitsandbytes_8bit(2),
    "lion-8bit": bitsandbytes_8bit(1),
    "paged-adamw": typed_states(2, "fp32"),
    "paged-adamw-8bit": bitsandbytes_8bit(2),
    "adamw-8bit-torchao": torchao(8, 256, 1024),
    "adamw-4bit-torchao": torchao(4, 128, 64),
    "adamw-fp8-torchao": torchao(8, 256, 0),
    "adafactor": factored(),
    "adafactor-transformers": factored("fp32"),
    "muon": momentum_of_matrices,
}
STATES: Mapping[str, StateRule] = _RULES | {
    name: stored_type_states(optimizer.moments)
    for name, optimizer in OPTIMIZERS.items()
    if optimizer.moments is not None
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


def state_tensors(name: str, tensors: Sequence[UpdatedTensor], dtype: str = "fp32") -> tuple[int, ...]:
    """Bytes of every state tensor for `tensors`, in order. `dtype` is the type of parameters without one of
    their own.

    Raises what `optimizer_of` raises.
    """
    rule = STATES[optimizer_of(name).name]
    return tuple(size for tensor in tensors for size in rule(tensor, tensor.dtype or dtype) if size)


Kernels = tuple[Kernel, ...]


def update_kernels(
    name: str,
    tensors: Sequence[UpdatedTensor],
    implementation: OptimizerImplementation = "fused",
    *,
    gradient_dtype: str = "fp32",
    stored_dtype: str = "fp32",
    low_precision_copy: bool = False,
) -> Kernels:
    """The update of `tensors`, which are stored in `stored_dtype`. With `low_precision_copy` a cast writes
    16-bit weights afterwards. An unsharded matrix is orthogonalised by Muon here. Matrices in parts are the
    plan's work.

    Raises what `optimizer_of` raises.
    """
    numel = sum(tensor.numel for tensor in tensors)
    if not numel:
        return ()
    optimizer = optimizer_of(name)
    if optimizer.is_torch_list:
        return optimizer_kernels(
            numel, name, implementation, num_tensors=len(tensors), gradient_dtype=gradient_dtype,
            state_dtype=stored_dtype, low_precision_copy=low_precision_copy,
        )  # fmt: skip
    casts = cast_kernels(numel, stored_dtype, "bf16") if low_precision_copy else ()
    if name == "muon":
        return (*_muon(tensors, implementation, gradient_dtype, stored_dtype), *casts)
    master, gradient = DTYPE_BYTES[stored_dtype], DTYPE_BYTES[gradient_dtype]
    passes, readings, kernels = EXTRA.get(name, (0, 0, 0))
    moved_bytes = numel * ((2 + passes) * master + (1 + readings) * gradient)
    moved_bytes += 2 * sum(state_tensors(name, tensors, stored_dtype))
    launches = 1 if optimizer.launches == "per list" else len(tensors) * (1 + kernels)
    return (Kernel("optimizer", 0.0, float(moved_bytes), "fp32", (), launches), *casts)


def _muon(
    tensors: Sequence[UpdatedTensor],
    implementation: OptimizerImplementation,
    gradient_dtype: str,
    stored_dtype: str,
) -> Kernels:
    """Each matrix by itself (torch has no foreach for Muon), the rest by AdamW."""
    kernels: list[Kernel] = []
    for tensor in tensors:
        if tensor.is_matrix:
            kernels += elementwise_kernels(tensor.numel, stored_dtype, gradient_dtype)
            kernels += orthogonalisation_kernels(tensor.shape[0], tensor.shape[1])
    vectors = [tensor for tensor in tensors if not tensor.is_matrix]
    adamw_kernels = optimizer_kernels(
        sum(tensor.numel for tensor in vectors), "adamw", implementation, num_tensors=len(vectors),
        gradient_dtype=gradient_dtype, state_dtype=stored_dtype,
    )  # fmt: skip
    return (*kernels, *adamw_kernels)


STEPS = 5  # DEFAULT_NS_STEPS


def orthogonalisation_kernels(rows: int, columns: int) -> tuple[Kernel, ...]:
    """The five rounds on a whole matrix."""
    short, long = sorted((rows, columns))
    return iteration_kernels(short, long) * STEPS


def iteration_kernels(short: int, long: int) -> tuple[Kernel, Kernel, Kernel]:
    """The three products of a round on X, `short x long`."""
    gram = product(short, short, long, 0)
    update = product(short, short, short, short * short)
    return gram, update, product(short, long, short, short * long)


def elementwise_kernels(numel: int, stored_dtype: str, gradient_dtype: str) -> tuple[Kernel, ...]:
    """Everything around the products, for `numel` elements: `buf.lerp_(grad)`, `grad.lerp(buf)`, the cast to
    bf16, the norm, the division, decay of the weights, the scaled add."""
    p, g, low = DTYPE_BYTES[stored_dtype], DTYPE_BYTES[gradient_dtype], 2
    momentum = 2 * p + g + (2 * g + p)
    bytes_per_element = momentum + (g + low) + low + 2 * low + 2 * p + (2 * p + low)
    return (Kernel("optimizer", 0.0, float(numel * bytes_per_element), "fp32", (), 8),)


def product(m: int, n: int, k: int, added: int) -> Kernel:
    """m x k by k x n in bf16, plus a tensor of `added` elements read for `addmm`."""
    m, n, k = max(m, 1), max(n, 1), max(k, 1)
    return Kernel("gemm", 2.0 * m * n * k, 2.0 * (m * k + k * n + m * n + added), "bf16", (m, n, k), 1)
