"""Hardware as files describe it: a GPU, and a cluster of identical nodes around it.

Every table of numbers carries a `source` and an `evidence` grade for the numbers in it:
`measured` (somebody timed it), `calibrated` (fitted to measurements), `data sheet` (the vendor's figure),
`assumed` (neither; the source says why). All link rates are per direction.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from zsim.errors import InputError, did_you_mean
from zsim.specs.cluster.collectives import CollectiveCosts as CollectiveCosts
from zsim.specs.cluster.collectives import ProtocolCosts as ProtocolCosts
from zsim.specs.cluster.network import Network as Network
from zsim.specs.cluster.offload_rates import OffloadRates as OffloadRates
from zsim.specs.cluster.offload_rates import default_offload_rates
from zsim.specs.cluster.table import EVIDENCE_ORDER as EVIDENCE_ORDER
from zsim.specs.cluster.table import Evidence as Evidence
from zsim.specs.cluster.table import Fraction as Fraction
from zsim.specs.cluster.table import Table as Table
from zsim.units import Bytes, BytesPerSecond, FlopsPerSecond, Seconds, Watts

PositiveBytes = Annotated[Bytes, Field(gt=0)]
PositiveRate = Annotated[BytesPerSecond, Field(gt=0)]
PositiveFlops = Annotated[FlopsPerSecond, Field(gt=0)]


class PeakRates(Table):
    """Dense peak arithmetic rates, without sparsity; None where the GPU lacks the type."""

    bf16: PositiveFlops | None = None
    fp16: PositiveFlops | None = None
    tf32: PositiveFlops | None = None
    fp32: PositiveFlops
    fp8: PositiveFlops | None = None


class DeviceMemory(Table):
    """`capacity` is what the driver reports as total."""

    capacity: PositiveBytes
    bandwidth: PositiveRate


class GemmEfficiency(Table):
    """Matrix products: see `zsim.cost.rates.efficiency.gemm_fraction` for the equation.

    `max_fraction` is what large products sustain on random data within the board's power; `by_dtype`
    replaces it for single types. `half_tile_fraction` of the rate is left each time the tile is halved,
    `unaligned_fraction` where the rows of a matrix as it lies in memory do not begin on multiples of 16
    bytes.
    """

    max_fraction: Fraction
    k_half: float = Field(ge=0, description="inner dimension at which half of the fraction is reached")
    tile_m: int = Field(gt=0)
    tile_n: int = Field(gt=0)
    half_tile_fraction: Fraction = 0.9
    unaligned_fraction: Fraction = 1.0
    by_dtype: dict[str, Fraction] = Field(default_factory=dict)


class NarrowKernel(BaseModel):
    """How many times the rate of the kernel for wide heads one reaches that was built for narrower ones."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    forward_ratio: float = Field(gt=0)
    backward_ratio: float = Field(gt=0)


class AttentionCurve(BaseModel):
    """Fraction of peak of fused attention, forward and backward, on long sequences of wide heads, and the
    sequence length and head width at which half of it is reached.

    `by_head_dim`: kernels that were built for narrower heads, by the widest that each one takes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    forward_fraction: Fraction
    backward_fraction: Fraction
    sequence_half: float = Field(ge=0)
    head_dim_half: float = Field(default=0.0, ge=0)
    by_head_dim: dict[PositiveInt, NarrowKernel] = Field(default_factory=dict)

    def fraction(self, head_dim: int, *, is_backward: bool) -> float:
        """That of the narrowest kernel that takes heads of width `head_dim`."""
        wide = self.backward_fraction if is_backward else self.forward_fraction
        fitting = [width for width in self.by_head_dim if width >= head_dim]
        if not fitting:
            return wide
        narrow = self.by_head_dim[min(fitting)]
        return min(wide * (narrow.backward_ratio if is_backward else narrow.forward_ratio), 1.0)


class AttentionEfficiency(Table, AttentionCurve):
    """Fused attention: see `zsim.cost.rates.efficiency.attention_fraction` for the equation.

    `variants`: the curves of other generations of the kernel by name ("flash1-triton", "flash3"), for
    `with_attention_variant`.
    """

    variants: dict[str, AttentionCurve] = Field(default_factory=dict)


class MemoryEfficiency(Table):
    """HBM-bound kernels: fraction of the data sheet's bandwidth, and the bytes at which half of it is
    reached (launch and ramp-up)."""

    elementwise_fraction: Fraction
    optimizer_fraction: Fraction
    copy_fraction: Fraction
    bytes_half: Bytes


class KernelLaunch(Table):
    """What a kernel costs the GPU besides its work: ramp-up, tail and the gap to the next kernel; a load from
    memory where nothing else runs until it is there; and an element that a thread of its own looks up by an
    index, if that takes longer than moving it (0: it does not, or was not timed)."""

    seconds_per_kernel: Seconds
    seconds_per_load: Seconds = 0.0
    seconds_per_indexed_element: Seconds = 0.0


class Interference(Table):
    """What kernels and collectives on one GPU cost each other (1.0: nothing): how much slower kernels run
    while a collective is under way, and how much longer a collective takes to move bytes inside its node
    while kernels run on one of its GPUs. The way through network cards, which need few multiprocessors, stays
    as fast."""

    compute_slowdown: float = Field(ge=1)
    communication_slowdown: float = Field(default=1.0, ge=1)


class Power(Table):
    """Board power by what the GPU does: `idle` while a job waits (memory held, clocks up), `memory_bound`
    under kernels bound by HBM, `maximum` the board's limit, where large matrix products run;
    `communication` while only collectives run (as `memory_bound` where it is left out)."""

    idle: Watts
    maximum: Watts
    memory_bound: Watts | None = None
    communication: Watts | None = None


class Gpu(BaseModel):
    """One GPU type (a file in `topologies/gpus/`)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    schema_version: Literal[1] = Field(alias="schema")
    name: str
    description: str
    vendor: Literal["nvidia", "amd", "cpu"]
    sm_count: int = Field(gt=0, le=10**6)
    supports_flash_attention: bool
    peak: PeakRates
    memory: DeviceMemory
    gemm: GemmEfficiency
    attention: AttentionEfficiency
    memory_bound: MemoryEfficiency
    launch: KernelLaunch
    interference: Interference
    power: Power | None = None


def with_attention_variant(gpu: Gpu, variant: str) -> Gpu:
    """The same GPU running another generation of fused attention, one of `gpu.attention.variants`.

    Raises InputError where the GPU's file has no curve of that name.
    """
    curve = gpu.attention.variants.get(variant)
    if curve is None:
        names = list(gpu.attention.variants)
        raise InputError(
            f"GPU '{gpu.name}' has no attention variant '{variant}'{did_you_mean(variant, names)}; "
            f"it has {', '.join(names) or 'none'}"
        )
    return gpu.model_copy(update={"attention": gpu.attention.model_copy(update=dict(curve))})


class NodeLink(Table):
    """The links between the GPUs of a node.

    `switch`: every GPU has `bandwidth` into and out of a non-blocking crossbar (NVSwitch).
    `mesh`: every GPU has `bandwidth` in all, spread evenly over direct links to the others.
    `none`: GPUs talk over PCIe.
    `efficiency`: the fraction of `bandwidth` that a large collective gets.
    `nodes_per_domain`: how many nodes one switched domain spans (an NVL72 is 18 trays of 4 GPUs).
    """

    kind: Literal["switch", "mesh", "none"]
    bandwidth: BytesPerSecond = 0.0
    efficiency: Fraction = 1.0
    latency: Seconds = 0.0
    nodes_per_domain: int = Field(default=1, gt=0, strict=True)

    @model_validator(mode="after")
    def _only_switches_span_nodes(self) -> Self:
        if self.kind != "none" and self.bandwidth <= 0:
            raise ValueError(f"bandwidth: kind '{self.kind}' needs one above 0")
        if self.nodes_per_domain > 1 and self.kind != "switch":
            raise ValueError(f"nodes_per_domain: only kind 'switch' spans nodes, found '{self.kind}'")
        return self


class Pcie(Table):
    """PCIe: each GPU has a link into a switch, `gpus_per_switch` share one uplink to the host."""

    bandwidth: PositiveRate
    efficiency: Fraction
    latency: Seconds
    gpus_per_switch: int = Field(default=1, gt=0)
    peer_to_peer: bool = True


class Nic(Table):
    """Network cards of one node; GPU i uses card i * per_node // gpus."""

    per_node: int = Field(gt=0, le=10**4)
    bandwidth: PositiveRate
    efficiency: Fraction
    latency: Seconds
    gpudirect: bool = True


class HostDevice(Table):
    """The CPU side of one node.

    `launch_queue`: launches that a stream takes before it has run them; beyond that the host waits. About
    1000 on CUDA, as measured by a user (stackoverflow.com/questions/53970187). `sockets` share memory, cores
    and GPUs evenly; `socket_bandwidth` is what one of them sends to the others. `pinned_limit`: how much may
    be page-locked in all (a locked-memory limit, a pool); None is no limit.
    """

    cores: int = Field(gt=0)
    memory: Bytes
    memory_bandwidth: PositiveRate
    seconds_per_launch: Seconds
    launch_queue: int = Field(default=1000, gt=0)
    overhead_factor: float = Field(default=1.0, gt=0, description="scales the frameworks' host costs")
    sockets: int = Field(default=1, gt=0, strict=True)
    socket_bandwidth: BytesPerSecond | None = None
    pinned_limit: Bytes | None = None

    @model_validator(mode="after")
    def _sockets_are_joined(self) -> Self:
        if self.sockets > 1 and not self.socket_bandwidth:
            raise ValueError(f"socket_bandwidth: {self.sockets} sockets need one above 0 between them")
        return self


class Nvme(Table):
    """Drives of one node, striped (RAID0); capacity and rates are each drive's own.

    `efficiency`: the part of the data sheet's bandwidth that asynchronous I/O gets. `mixed_overlap`: how far
    reading and writing at once add up, from 1 (the drive does one or the other) to 2 (independent).
    `attached`: "host" to root ports of their own, "switch" under the GPUs' PCIe switches, spread evenly.
    `write_cache` per drive, `sustained_write_bandwidth` beyond it (both or neither).
    """

    drives: int = Field(ge=0)
    capacity: Bytes
    read_bandwidth: PositiveRate
    write_bandwidth: BytesPerSecond
    efficiency: Fraction = 1.0
    read_latency: Seconds = 1e-4
    write_latency: Seconds = 3e-5
    mixed_overlap: float = Field(default=1.0, ge=1, le=2)
    attached: Literal["host", "switch"] = "host"
    write_cache: Bytes | None = None
    sustained_write_bandwidth: BytesPerSecond | None = None


class FrameworkMemory(Table):
    """GPU memory that torch's allocator does not see, and what the allocator wastes."""

    context: Bytes
    communicator: Bytes
    allocator_margin: float = Field(ge=0, lt=1, description="reserved but unusable, fraction of allocated")


class Cluster(BaseModel):
    """A cluster of identical nodes (a file in `topologies/`); `gpu` is resolved by the loader."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    schema_version: Literal[1] = Field(alias="schema")
    name: str
    description: str
    gpu: Gpu
    gpus_per_node: int = Field(gt=0)
    node_link: NodeLink
    pcie: Pcie
    nic: Nic
    network: Network
    collectives: CollectiveCosts
    host: HostDevice
    nvme: Nvme | None = None
    offload: OffloadRates = Field(default_factory=default_offload_rates)
    framework_memory: FrameworkMemory

    @property
    def longer_links(self) -> tuple[float, float]:
        """Seconds that links take longer than those of the measured rounds, inside nodes and between them."""
        known = self.collectives.measured_on
        if known is None:
            return 0.0, 0.0
        across = self.nic.latency + self.network.latency - known.nic - known.network
        return max(0.0, self.node_link.latency - known.node_link), max(0.0, across)
