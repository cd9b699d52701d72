"""A GPU: figures of its data sheet and measured rates of its kernels."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from zsim.errors import InputError, did_you_mean
from zsim.specs.cluster.table import Fraction, Table
from zsim.units import Bytes, BytesPerSecond, FlopsPerSecond, Seconds, Watts

PositiveBytes = Annotated[Bytes, Field(gt=0)]


PositiveRate = Annotated[BytesPerSecond, Field(gt=0)]


PositiveFlops = Annotated[FlopsPerSecond, Field(gt=0)]


class PeakRates(Table):
    """Dense peak arithmetic rates, without sparsity; None where the GPU lacks the type."""

    bf16: PositiveFlops | None = Field(
        default=None, description="dense products of bf16; left out: the GPU has none"
    )
    fp16: PositiveFlops | None = Field(default=None, description="dense products of fp16")
    tf32: PositiveFlops | None = Field(default=None, description="dense products of tf32")
    fp32: PositiveFlops = Field(description="dense products of fp32")
    fp8: PositiveFlops | None = Field(default=None, description="dense products of fp8")


class DeviceMemory(Table):
    """The GPU's memory."""

    capacity: PositiveBytes = Field(description="in all, as the driver reports it")
    bandwidth: PositiveRate = Field(description="by the data sheet")


class GemmEfficiency(Table):
    """Matrix products: see `zsim.cost.rates.efficiency.gemm_fraction` for the equation."""

    max_fraction: Fraction = Field(
        description="what large products sustain of the peak, on random data and within the board's power"
    )
    k_half: float = Field(ge=0, description="inner dimension at which half of the fraction is reached")
    tile_m: int = Field(gt=0, description="rows of the output that one block of threads computes")
    tile_n: int = Field(gt=0, description="columns of the output that one block of threads computes")
    half_tile_fraction: Fraction = Field(
        default=0.9, description="of the rate, left each time the tile is halved"
    )
    unaligned_fraction: Fraction = Field(
        default=1.0, description="of the rate, left where rows do not begin on multiples of 16 bytes"
    )
    by_dtype: dict[str, Fraction] = Field(default_factory=dict, description="`max_fraction` of single types")


class NarrowKernel(BaseModel):
    """Rate of a kernel built for narrower heads, as a ratio to the rate of the kernel for wide heads."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, allow_inf_nan=False)

    forward_ratio: float = Field(gt=0, description="forward rate over that of the kernel for wide heads")
    backward_ratio: float = Field(gt=0, description="backward rate over that of the kernel for wide heads")


class AttentionCurve(BaseModel):
    """Rate of fused attention, by sequence length and head width."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, allow_inf_nan=False)

    forward_fraction: Fraction = Field(description="of the peak, forward, on long sequences of wide heads")
    backward_fraction: Fraction = Field(description="of the peak, backward, on long sequences of wide heads")
    sequence_half: float = Field(ge=0, description="sequence length at which half of the fraction is reached")
    head_dim_half: float = Field(
        default=0.0, ge=0, description="head width at which half of the fraction is reached"
    )
    by_head_dim: dict[PositiveInt, NarrowKernel] = Field(
        default_factory=dict,
        description="kernels built for narrower heads, by the widest head that each takes",
    )

    def fraction(self, head_dim: int, *, is_backward: bool) -> float:
        """The fraction of the narrowest kernel that takes heads of width `head_dim`."""
        wide = self.backward_fraction if is_backward else self.forward_fraction
        fitting = [width for width in self.by_head_dim if width >= head_dim]
        if not fitting:
            return wide
        narrow = self.by_head_dim[min(fitting)]
        return min(wide * (narrow.backward_ratio if is_backward else narrow.forward_ratio), 1.0)


class AttentionEfficiency(Table, AttentionCurve):
    """Fused attention: see `zsim.cost.rates.efficiency.attention_fraction` for the equation."""

    variants: dict[str, AttentionCurve] = Field(
        default_factory=dict,
        description="other generations of the kernel, by the name that `training.attention` asks for",
    )


class MemoryEfficiency(Table):
    """Kernels bound by memory: fractions of the data sheet's bandwidth; small ones reach less (launch and
    ramp-up)."""

    elementwise_fraction: Fraction = Field(
        description="what elementwise kernels reach of the memory's bandwidth"
    )
    optimizer_fraction: Fraction = Field(description="what the optimizer's update reaches of it")
    copy_fraction: Fraction = Field(description="what copies and casts reach of it")
    bytes_half: Bytes = Field(description="bytes at which half of the fraction is reached")


class KernelLaunch(Table):
    """Costs of a kernel to the GPU besides its work."""

    seconds_per_kernel: Seconds = Field(description="ramp-up, tail, and the gap to the next kernel")
    seconds_per_load: Seconds = Field(default=0.0, description="a load whose latency nothing overlaps")
    seconds_per_indexed_element: Seconds = Field(
        default=0.0, description="a lookup by index, if it takes longer than moving the element"
    )


class Interference(Table):
    """Mutual slowdown of kernels and collectives on one GPU (1.0: none). Transfers through network cards,
    which need few multiprocessors, are not slowed."""

    compute_slowdown: float = Field(ge=1, description="factor on kernels while a collective runs")
    communication_slowdown: float = Field(
        default=1.0, ge=1, description="factor on a collective inside its node while kernels run"
    )


class Power(Table):
    """Board power by what the GPU does. Idle: memory is held, and clocks are up."""

    idle: Watts = Field(description="while a job waits")
    maximum: Watts = Field(description="the board's limit, which large products reach")
    memory_bound: Watts | None = Field(default=None, description="under kernels that are bound by memory")
    communication: Watts | None = Field(
        default=None, description="while only collectives run; left out: as `memory_bound`"
    )


class Gpu(BaseModel):
    """One GPU type (a file in `topologies/gpus/`). Compute capability: the CUDA C++ Programming Guide's table
    of them; other vendors have none."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, allow_inf_nan=False)

    schema_version: Literal[1] = Field(alias="schema", description="the version of the file's format")
    name: str = Field(description="the GPU's name in reports")
    description: str = Field(description="one line about it")
    vendor: Literal["nvidia", "amd", "cpu"] = Field(description="who made it")
    sm_count: int = Field(gt=0, le=10**6, description="streaming multiprocessors, or compute units")
    compute_capability: float | None = Field(default=None, gt=0, description="NVIDIA's, as 9.0 for Hopper")
    supports_flash_attention: bool = Field(description="whether fused attention runs on it")
    peak: PeakRates = Field(description="dense arithmetic rates of the data sheet")
    memory: DeviceMemory = Field(description="capacity and bandwidth")
    gemm: GemmEfficiency = Field(description="what matrix products reach")
    attention: AttentionEfficiency = Field(description="what fused attention reaches")
    memory_bound: MemoryEfficiency = Field(description="what kernels bound by memory reach")
    launch: KernelLaunch = Field(description="what a kernel costs besides its work")
    interference: Interference = Field(description="how kernels and collectives slow one another")
    power: Power | None = Field(default=None, description="what the board draws")


def with_attention_variant(gpu: Gpu, variant: str) -> Gpu:
    """The GPU running another generation of fused attention, one of `gpu.attention.variants`.

    Raises InputError if the GPU's file has no curve of that name.
    """
    curve = gpu.attention.variants.get(variant)
    if curve is None:
        names = list(gpu.attention.variants)
        raise InputError(
            f"GPU '{gpu.name}' has no attention variant '{variant}'{did_you_mean(variant, names)}; "
            f"it has {', '.join(names) or 'none'}"
        )
    return gpu.model_copy(update={"attention": gpu.attention.model_copy(update=dict(curve))})
