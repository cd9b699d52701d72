"""The work of Megatron's Muon on one matrix, of which tensor-parallel ranks may each have a part.

Megatron-Core 0.16.1 core/optimizer/muon.py (`TensorParallelMuon.orthogonalize`), 0.18.2
core/optimizer/emerging_optimizers.py, on NVIDIA's Emerging-Optimizers 0.1.0 and 0.2.0
(orthogonalized_optimizers/orthogonalized_optimizer.py `step`, muon_utils.py `newton_schulz_tp`,
`newton_schulz`), in fp32 but for the products. Torch's operators one by one, in bytes per element:

    weight decay 8, momentum `lerp_` 12, Nesterov's sum 12, the update's `add_` 12
    each orthogonalised part: norm 4, division 8, cast to bf16 6 and back 6, times the scale 8, and again 8
    fused queries, keys and values: copied apart 8, and joined 8

# [Note: tensor-parallel modes]
blockwise: the rank's part is orthogonalised as if it were the full matrix. duplicated: the full matrix is
gathered in fp32, joined, and orthogonalised on every rank. distributed: X stays cut along its longer side,
which is taken to be the one that is cut. The norm and every X X^T are summed over the ranks, so X X^T is as
large as the side that is not cut, whichever is longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from zsim.cost.kernels.kernel import Kernel
from zsim.cost.optimizers.muon import iteration_kernels
from zsim.frameworks.megatron.settings.muon import MuonOrthogonalization, TensorMode

FP32, BF16 = 4, 2


@dataclass(frozen=True, slots=True)
class MuonMatrix:
    """A matrix as a tensor-parallel rank has it, `rows x columns`."""

    rows: int
    columns: int
    row_groups: tuple[int, ...] = ()
    """Rows that are orthogonalised by themselves (queries, keys, values), () for all as one matrix."""
    sharded_dimension: int | None = None
    """The dimension that the ranks of its group share, as Transformer Engine marks it, on one rank too. None
    if it is marked with none.
    """

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def heights(self) -> tuple[int, ...]:
        return self.row_groups or (self.rows,)


@dataclass(frozen=True, slots=True)
class MatrixCall:
    """Kernels, or a collective over the tensor-parallel ranks, of `bytes` in `dtype`. It is one of
    the two.
    """

    name: str
    kernels: tuple[Kernel, ...] = ()
    collective: Literal["", "all_gather", "all_reduce"] = ""
    bytes: int = 0
    dtype: str = "fp32"


def muon_calls(matrix: MuonMatrix, work: MuonOrthogonalization, ranks: int) -> Iterator[MatrixCall]:
    """The calls of one matrix's update, in order. `ranks` is the size of its tensor-parallel group.

    See [Note: tensor-parallel modes].
    """
    numel = matrix.numel
    bytes_per_element = 8 + 12 + (12 if work.nesterov else 0)
    yield MatrixCall("momentum", (_pass(numel * bytes_per_element, 3 if work.nesterov else 2),))
    if matrix.row_groups:
        yield MatrixCall("split", (_pass(numel * 8, len(matrix.row_groups)),))
    mode: TensorMode = "blockwise" if matrix.sharded_dimension is None else work.mode
    for height in matrix.heights:
        yield from _orthogonalise_calls(height, matrix, mode, work, ranks)
        yield MatrixCall("scale", (_pass(height * matrix.columns * 16, 2),))
    if matrix.row_groups:
        yield MatrixCall("join", (_pass(numel * 8, 1),))
    yield MatrixCall("update", (_pass(numel * 12, 1),))


def muon_flops(matrix: MuonMatrix, work: MuonOrthogonalization, ranks: int) -> float:
    """FLOPs of a matrix's products on a rank."""
    return sum(kernel.flops for call in muon_calls(matrix, work, ranks) for kernel in call.kernels)


def transient_bytes(matrix: MuonMatrix, work: MuonOrthogonalization, ranks: int) -> int:
    """Maximum bytes of the temporary tensors while a matrix is orthogonalised.

    For a part of n elements they are the result and both scaled ones, 12 n. While the full matrix of N is
    gathered they are its parts and it, 8 N, and a normalised copy in fp32 and one in bf16. In addition there
    are the copies of fused parts and those that are done, and Nesterov's sum.
    """
    finished, peak = 0, 0
    copies = FP32 * matrix.numel * (bool(matrix.row_groups) + work.nesterov)
    for height in matrix.heights:
        numel = height * matrix.columns
        peak = max(peak, copies + finished + 3 * FP32 * numel)
        if work.mode == "duplicated" and matrix.sharded_dimension is not None:
            full_numel = ranks * numel
            peak = max(peak, copies + finished + 2 * FP32 * full_numel + (FP32 + BF16) * full_numel)
        finished += FP32 * numel
    joined_bytes = FP32 * matrix.numel * (2 if matrix.row_groups else 0)
    return max(peak, copies + joined_bytes)


def _orthogonalise_calls(
    height: int, matrix: MuonMatrix, mode: TensorMode, work: MuonOrthogonalization, ranks: int
) -> Iterator[MatrixCall]:
    """`newton_schulz_tp` of `height` rows."""
    numel = height * matrix.columns
    if mode == "distributed":
        yield MatrixCall("square", (_pass(numel * 12, 2),))
        yield MatrixCall("norm", collective="all_reduce", bytes=FP32)
        short, long = (matrix.columns, height) if matrix.sharded_dimension == 0 else (height, matrix.columns)
        yield MatrixCall("normalise", _casts(numel, work, numel * 8, 3))
        gram, *products = _cast_products(iteration_kernels(short, long), work)
        element = BF16 if work.dtype == "bf16" else FP32
        size = element * short * short
        for _ in range(work.steps):
            yield MatrixCall("gram matrix", (gram,))
            yield MatrixCall("gram matrix", collective="all_reduce", bytes=size, dtype=_stored(work))
            yield MatrixCall("products", tuple(products))
        yield MatrixCall("back", _cast_back(numel, work))
        return
    rows, columns = height, matrix.columns
    if mode == "duplicated":
        full_numel = ranks * numel
        yield MatrixCall("part", collective="all_gather", bytes=FP32 * full_numel)
        yield MatrixCall("join parts", (_pass(full_numel * 16, ranks + 1),))
        rows, columns = (ranks * rows, columns) if matrix.sharded_dimension == 0 else (rows, ranks * columns)
        numel = full_numel
    yield MatrixCall("normalise", _casts(numel, work, numel * 12, 3))
    short, long = sorted((rows, columns))
    yield MatrixCall("products", _cast_products(iteration_kernels(short, long), work) * work.steps)
    yield MatrixCall("back", _cast_back(numel, work))


def _cast_products(kernels: tuple[Kernel, ...], work: MuonOrthogonalization) -> tuple[Kernel, ...]:
    """Products in the type of `fp32_matmul_prec`: tf32 reads and writes fp32."""
    if work.dtype == "bf16":
        return kernels
    return tuple(replace(kernel, dtype=work.dtype, hbm_bytes=2 * kernel.hbm_bytes) for kernel in kernels)


def _stored(work: MuonOrthogonalization) -> str:
    return "bf16" if work.dtype == "bf16" else "fp32"


def _casts(numel: int, work: MuonOrthogonalization, moved_bytes: int, launches: int) -> tuple[Kernel, ...]:
    is_cast = work.dtype == "bf16"
    return (_pass(moved_bytes + is_cast * numel * (FP32 + BF16), launches + is_cast),)


def _cast_back(numel: int, work: MuonOrthogonalization) -> tuple[Kernel, ...]:
    return (_pass(numel * (FP32 + BF16), 1),) if work.dtype == "bf16" else ()


def _pass(moved_bytes: int, launches: int) -> Kernel:
    return Kernel("optimizer", 0.0, float(moved_bytes), "fp32", (), launches)
