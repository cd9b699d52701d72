"""A GPU: figures of its data sheet and measured rates of its kernels."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from zsim.cost.kernels.kernel import SCAN_KINDS
from zsim.errors import InputError, did_you_mean
from zsim.specs.lazy_model import FiniteTable, Fraction, Table
from zsim.units import Bytes, BytesPerSecond, FlopsPerSecond, Seconds, Watts


class StreamingKernel(FiniteTable):
    """A kernel that reads memory once. It takes `seconds + bytes / (fraction x bandwidth)`."""

    seconds: Seconds = Field(ge=0, description="time of the kernel whatever it reads, in a CUDA graph")
    fraction: Fraction = Field(description="of the memory's bandwidth, reached by large reads")

    def seconds_for(self, num_bytes: float, bandwidth: float) -> float:
        """Seconds to read `num_bytes` at a `bandwidth` in bytes/s."""
        return self.seconds + num_bytes / (self.fraction * bandwidth)


class TypeFractions(FiniteTable):
    """Fractions of the peak by the type of weights. Types that the GPU lacks have none."""

    bf16: Fraction = Field(description="of 16-bit weights")
    fp8: Fraction | None = Field(default=None, description="of fp8 weights; left out: the GPU lacks them")
    fp4: Fraction | None = Field(default=None, description="of fp4 weights; left out: the GPU lacks them")

    def of(self, dtype: str) -> float:
        """The fraction of a type, or of the next wider one with a fraction."""
        candidates = {"fp4": (self.fp4, self.fp8), "fp8": (self.fp8,)}.get(dtype, ())
        return next((fraction for fraction in candidates if fraction is not None), self.bf16)


class SmallAllReduce(FiniteTable):
    """An all-reduce inside a node by kernels that read one another's memory, as engines of inference have.

    It takes `seconds + 2 (n - 1) / n x bytes / bandwidth` on n ranks.
    """

    seconds: Seconds = Field(ge=0, description="time of an all-reduce of a few bytes")
    bandwidth: BytesPerSecond = Field(gt=0, description="bus bandwidth of messages around a megabyte")

    def seconds_of(self, num_bytes: float, ranks: int) -> float:
        """Seconds of an all-reduce of `num_bytes` bytes."""
        return self.seconds + 2 * (ranks - 1) / ranks * num_bytes / self.bandwidth


class DecodeRates(Table):
    """`[decode]` of a GPU's file."""

    product: StreamingKernel = Field(description="products of 16-bit weights with at most 64 rows")
    quantized_product: StreamingKernel = Field(
        description="products of fp8 or fp4 weights, the cast of their rows included"
    )
    attention: StreamingKernel = Field(description="attention of one token a sequence, grouped heads")
    latent_attention: StreamingKernel = Field(description="the same over a latent cache, all heads at once")
    experts: StreamingKernel = Field(description="both grouped products of a layer's experts")
    all_reduce: SmallAllReduce = Field(description="an all-reduce of activations on one node")
    arithmetic: TypeFractions = Field(description="of the peak, reached by products of thousands of rows")
    expert_arithmetic: TypeFractions = Field(
        description="the same of grouped products, of a thousand rows an expert"
    )


PositiveBytes = Annotated[Bytes, Field(gt=0)]


PositiveRate = Annotated[BytesPerSecond, Field(gt=0)]


PositiveFlops = Annotated[FlopsPerSecond, Field(gt=0)]


# Of a data sheet's peak, which is at the boost clock. Boards whose power lets them run above it.
ClockedFraction = Annotated[float, Field(gt=0, le=1.5)]


class PeakRates(Table):
    """Dense peak arithmetic rates, without sparsity. None where the GPU lacks the type."""

    bf16: PositiveFlops | None = Field(
        default=None, description="dense products of bf16; left out: the GPU has none"
    )
    fp16: PositiveFlops | None = Field(
        default=None, description="dense products of fp16; left out: the GPU has none"
    )
    tf32: PositiveFlops | None = Field(
        default=None, description="dense products of tf32; left out: the GPU has none"
    )
    fp32: PositiveFlops = Field(description="dense products of fp32")
    fp8: PositiveFlops | None = Field(
        default=None, description="dense products of fp8; left out: the GPU has none"
    )
    int8: PositiveFlops | None = Field(
        default=None,
        description="dense products of int8, in operations; left out: that of fp8, where the GPU has it",
    )
    fp4: PositiveFlops | None = Field(
        default=None, description="dense products of fp4; left out: the GPU has none"
    )


class DeviceMemory(Table):
    """The GPU's memory."""

    capacity: PositiveBytes = Field(description="in all, as the driver reports it")
    bandwidth: PositiveRate = Field(description="by the data sheet")


class ProductsInOneCall(FiniteTable):
    """Many products in one call: equal ones (torch.bmm, baddbmm) of attention that is written out, or those
    of experts in one kernel (torch's grouped_mm)."""

    ratio: float = Field(gt=0, le=1, description="rate over that of one large product")
    k_half: float = Field(ge=0, description="inner dimension at which half of the rate is reached")


class GemmEfficiency(Table):
    """Matrix products: see `zsim.cost.rates.efficiency.gemm_fraction` for the equation.

    The keys of `by_dtype` include "fp8-block", "fp8-mx" and "fp8-rowwise", which are fp8 with scales by block
    or row. Transformer Engine's layers call cuBLASLt themselves, with another workspace and the cuBLAS of
    NVIDIA's containers, so `transformer_engine_ratio` is not known where only products of torch were timed.
    """

    max_fraction: ClockedFraction = Field(
        description="of the peak, sustained by large products of random data within the board's power; above "
        "1 on boards that clock higher than their data sheet"
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
    four_byte_fraction: Fraction | None = Field(
        default=None,
        description="of the rate, left where rows begin on multiples of 4 bytes only; left out: "
        "`unaligned_fraction`",
    )
    transformer_engine_ratio: float = Field(
        default=1.0,
        gt=0,
        description="rate of products that Transformer Engine calls over that of torch's; left out: alike",
    )
    batched: ProductsInOneCall | None = Field(
        default=None, description="many equal products in one call; left out: as one product"
    )
    grouped: ProductsInOneCall | None = Field(
        default=None, description="products of experts in one kernel; left out: as one product"
    )
    by_dtype: dict[str, ClockedFraction] = Field(
        default_factory=dict, description="`max_fraction` of single types; left out: `max_fraction` of all"
    )


class NarrowKernel(FiniteTable):
    """Rate of a kernel built for narrower heads, as a ratio to the rate of the kernel for wide heads."""

    forward_ratio: float = Field(gt=0, description="forward rate over that of the kernel for wide heads")
    backward_ratio: float = Field(gt=0, description="backward rate over that of the kernel for wide heads")


class AttentionBlocks(FiniteTable):
    """Blocks of threads of fused attention, each of which works through rows of one head.

    See `zsim.cost.rates.efficiency.occupied_fraction`.
    """

    rows: PositiveInt = Field(description="queries of a block, in backward keys")
    tail: float = Field(
        ge=0, description="time in which SMs fall idle one by one, in that of the longest block"
    )
    limit: PositiveInt | None = Field(
        default=None, description="most blocks of all heads wider than `rows`; left out: no bound"
    )


class AttentionCurve(FiniteTable):
    """Fraction of peak of fused attention, forward and backward, on long sequences of wide heads.

    Half of it is reached at a sequence length and a head width.
    """

    forward_fraction: Fraction = Field(description="of the peak, forward, on long sequences of wide heads")
    backward_fraction: Fraction = Field(description="of the peak, backward, on long sequences of wide heads")
    sequence_half: float = Field(ge=0, description="sequence length at which half of the fraction is reached")
    backward_sequence_half: float | None = Field(
        default=None, ge=0, description="the same of backward; left out: as forward"
    )
    head_dim_half: float = Field(
        default=0.0, ge=0, description="head width at which half of the fraction is reached"
    )
    by_head_dim: dict[PositiveInt, NarrowKernel] = Field(
        default_factory=dict,
        description="kernels for narrower heads, by the widest that each takes; left out: one for all",
    )

    forward_blocks: AttentionBlocks | None = Field(
        default=None, description="of forward; left out: few heads run at the rate of many"
    )
    backward_blocks: AttentionBlocks | None = Field(default=None, description="of backward, likewise")

    def half_length(self, *, is_backward: bool) -> float:
        """`sequence_half`, or backward's own."""
        backward_half = self.backward_sequence_half if is_backward else None
        return self.sequence_half if backward_half is None else backward_half

    def fraction(self, head_dim: int, *, is_backward: bool) -> float:
        """The fraction of the narrowest kernel that takes heads of width `head_dim`."""
        wide = self.backward_fraction if is_backward else self.forward_fraction
        fitting = [width for width in self.by_head_dim if width >= head_dim]
        if not fitting:
            return wide
        narrow = self.by_head_dim[min(fitting)]
        return min(wide * (narrow.backward_ratio if is_backward else narrow.forward_ratio), 1.0)


class AttentionEfficiency(Table, AttentionCurve):
    """Fused attention: see `zsim.cost.rates.efficiency.attention_fraction` for the equation.

    `variants` are named as in "flash1-triton" and "flash3", for `select_attention_variant`.
    `is_deterministic` and `writes_scores` are priced by `zsim.cost.rates.deterministic`.
    """

    variants: dict[str, AttentionCurve] = Field(
        default_factory=dict,
        description="other kernels, by their name in `training.attention`; left out: only this one",
    )
    is_deterministic: bool = Field(
        default=False, description="backward gives the same bits each time, as FlashAttention-2 has it"
    )
    writes_scores: bool = Field(
        default=False,
        description="deterministic backward that writes the scores' gradient to memory, as cuDNN before 9.25 "
        "on Hopper",
    )


class ScanRate(FiniteTable):
    """Rates of the kernels of one kind of recurrence: see `zsim.cost.rates.gpu`."""

    bandwidth_fraction: Fraction = Field(description="of the memory's bandwidth, on many tokens")
    seconds_per_chunk: Seconds = Field(
        default=0.0, ge=0, description="a chunk of a sequence, each after the one before it"
    )


# The median of the eight GPUs whose files have it (H100, H200, B200, B300, GB200, GB300, L40S, RTX PRO 6000).
_MIDDLE_SCAN = {"bandwidth_fraction": 0.46, "seconds_per_chunk": "3 us"}


class MixerEfficiency(Table):
    """Mixers other than attention: recurrences in chunks, and short convolutions.

    The keys of `scans` are kinds of kernels: "delta_scan" (Gated DeltaNet), "channel_delta_scan" (Kimi delta
    attention), "state_space_scan" (Mamba-2), "selective_scan" (Mamba), "lightning_scan". A kind that
    nobody measured on a GPU runs like its delta_scan, and where that is unknown too like the middle of those
    that were measured.
    """

    source: str = Field(
        default="not measured on this GPU: the medians of the eight whose files have them, assumed",
        min_length=1,
        description="where the numbers come from",
    )
    convolution_fraction: Fraction = Field(
        default=0.45, description="what short convolutions reach of the memory's bandwidth"
    )
    sparse_fraction: Fraction = Field(
        default=0.28, description="what attention over chosen keys reaches of the peak"
    )
    indexer_fraction: Fraction = Field(
        default=0.40, description="what the scores by which they are chosen reach of it"
    )
    top_k_fraction: Fraction = Field(
        default=0.08, description="what the choice reaches of the memory's bandwidth"
    )
    sustained_fraction: Fraction = Field(
        default=1.0, description="of the rates here, what a GPU sustains in a step"
    )
    scans: dict[str, ScanRate] = Field(
        default_factory=dict, description="by kind of kernel; left out: as `delta_scan`"
    )

    @model_validator(mode="after")
    def _check_kinds(self) -> Self:
        for kind in self.scans:
            if kind not in SCAN_KINDS:
                raise ValueError(
                    f"scans: found '{kind}'{did_you_mean(kind, SCAN_KINDS)}; expected one of "
                    f"{', '.join(SCAN_KINDS)}"
                )
        return self

    def scan(self, kind: str) -> ScanRate:
        """The rates of a kind of kernel."""
        scan = self.scans.get(kind) or self.scans.get("delta_scan")
        return scan or ScanRate.model_validate(_MIDDLE_SCAN)


class MemoryEfficiency(Table):
    """HBM-bound kernels: fraction of the data sheet's bandwidth, and the bytes at which half of it is
    reached.

    The bytes stand for launch and ramp-up.
    """

    elementwise_fraction: Fraction = Field(
        description="what elementwise kernels reach of the memory's bandwidth"
    )
    optimizer_fraction: Fraction = Field(description="what the optimizer's update reaches of it")
    copy_fraction: Fraction = Field(description="what copies and casts reach of it")
    bytes_half: Bytes = Field(description="bytes at which half of the fraction is reached")


class CacheRates(Table):
    """The last cache before the memory, which keeps a tensor that the kernel before has just written.

    See `zsim.cost.rates.efficiency.cached_fraction` for the equation. Without this table every kernel reads
    and writes the memory.
    """

    capacity: PositiveBytes = Field(description="what it holds, of all SMs together")
    bandwidth: PositiveRate = Field(
        description="of elementwise kernels whose tensors all fit; no effect below what the memory gives"
    )


class KernelLaunch(Table):
    """Costs of a kernel to the GPU besides its work.

    An indexed element is also one that threads reach by walking the strides of three and more dimensions. A
    strided element is one of two (a slice of rows, a broadcast row). An added element is one of a row that is
    added to a row picked by an index (scatter_add). 0 means that it takes no longer than moving the element,
    or was not timed.
    """

    seconds_per_kernel: Seconds = Field(description="ramp-up, tail, and the gap to the next kernel")
    seconds_per_load: Seconds = Field(default=0.0, description="a load whose latency nothing overlaps")
    seconds_per_indexed_element: Seconds = Field(
        default=0.0, description="a lookup by index, if it takes longer than moving the element"
    )
    seconds_per_strided_element: Seconds = Field(
        default=0.0, description="an element of a slice, if it takes longer than moving the element"
    )
    seconds_per_added_element: Seconds = Field(
        default=0.0, description="an element added to one picked by an index, if that takes longer"
    )


class Interference(Table):
    """Mutual slowdown of kernels and collectives on one GPU (1.0: none).

    Kernels are slowed while a collective is in flight, and a collective's transfers inside its node while
    kernels run on one of its GPUs. Transfers through network cards, which need few multiprocessors, are not
    slowed.
    """

    compute_slowdown: float = Field(ge=1, description="factor on kernels while a collective runs")
    communication_slowdown: float = Field(
        default=1.0, ge=1, description="factor on a collective inside its node while kernels run"
    )


class Power(Table):
    """Board power by what the GPU does.

    A waiting job holds memory and keeps clocks up. `exponent` is stated where the chip was measured at two
    limits (default: `presets/power_law.toml`).
    """

    idle: Watts = Field(description="while a job waits")
    maximum: Watts = Field(description="the board's limit, which large products reach")
    memory_bound: Watts | None = Field(
        default=None, description="under kernels that are bound by memory; left out: energy is not told"
    )
    communication: Watts | None = Field(
        default=None, description="while only collectives run; left out: as `memory_bound`"
    )
    lower_limits: tuple[Watts, ...] = Field(
        default=(), description="limits at which some servers run the same board; left out: none is known"
    )
    exponent: float | None = Field(
        default=None,
        gt=0,
        description="of the rate of matrix products over the power limit; left out: that of published pairs",
    )

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        draws = {"idle": self.idle, "memory_bound": self.memory_bound, "communication": self.communication}
        for key, watts in draws.items():
            if watts is not None and watts > self.maximum:
                raise ValueError(
                    f"{key} is {watts:g} W, above the maximum of {self.maximum:g} W, which no board draws; "
                    f"expected {key} of at most that"
                )
        return self


class Gpu(FiniteTable):
    """One GPU type (a file in `topologies/gpus/`).

    `compute_capability` is NVIDIA's, as in the CUDA C++ Programming Guide's table of them. `sm_count` counts
    the units that work on tiles of a matrix product in parallel (SMs, AMD's CUs, an accelerator's matrix
    engines).
    """

    schema_version: Literal[1] = Field(alias="schema", description="the version of the file's format")
    name: str = Field(description="the GPU's name in reports")
    description: str = Field(description="one line about it")
    vendor: Literal["nvidia", "amd", "cpu", "other"] = Field(description="who made it")
    sm_count: int = Field(gt=0, le=10**6, description="streaming multiprocessors, or compute units")
    compute_capability: float | None = Field(
        default=None, gt=0, description="NVIDIA's, as 9.0 for Hopper; left out: not known, or another vendor"
    )
    supports_flash_attention: bool = Field(description="whether fused attention runs on it")
    peak: PeakRates = Field(description="dense arithmetic rates of the data sheet")
    memory: DeviceMemory = Field(description="capacity and bandwidth")
    gemm: GemmEfficiency = Field(description="what matrix products reach")
    attention: AttentionEfficiency = Field(description="what fused attention reaches")
    memory_bound: MemoryEfficiency = Field(description="what kernels bound by memory reach")
    cache: CacheRates | None = Field(
        default=None, description="the last cache before the memory; left out: none is counted on"
    )
    mixers: MixerEfficiency = Field(
        default_factory=MixerEfficiency,
        description="what recurrences and short convolutions reach; left out: the middle of measured GPUs",
    )
    launch: KernelLaunch = Field(description="what a kernel costs besides its work")
    interference: Interference = Field(description="how kernels and collectives slow one another")
    decode: DecodeRates | None = Field(
        default=None, description="what kernels of inference reach; left out: assumed from the rest"
    )
    power: Power | None = Field(default=None, description="what the board draws")
    power_limit: Watts | None = Field(
        default=None,
        description="the board's limit, if it is not the file's; left out: that of the file's [power]",
    )
    caching_allocator: bool | None = Field(
        default=None,
        description="whether torch's caching allocator keeps freed blocks, as on CUDA; required for vendor "
        "\"other\"; left out: true for NVIDIA's and AMD's",
    )

    @model_validator(mode="after")
    def _check_vendor_keys(self) -> Self:
        if self.vendor == "other" and self.caching_allocator is None:
            raise ValueError(
                "caching_allocator: vendor 'other' must say whether torch allocates its memory as CUDA's, in "
                "blocks that it keeps; expected true or false"
            )
        if self.vendor != "other" and self.caching_allocator is not None:
            raise ValueError(f"caching_allocator: is known for vendor '{self.vendor}'; leave it out")
        if self.vendor != "nvidia" and self.compute_capability is not None:
            raise ValueError(f"compute_capability: is NVIDIA's; vendor '{self.vendor}' has none")
        return self

    @property
    def has_caching_allocator(self) -> bool:
        """Whether torch's caching allocator manages its memory."""
        return self.vendor in ("nvidia", "amd") or bool(self.caching_allocator)


def select_attention_variant(gpu: Gpu, variant: str) -> Gpu:
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
