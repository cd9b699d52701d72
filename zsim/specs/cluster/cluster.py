"""Hardware as files describe it: GPUs, and a cluster of nodes around them.

Every table of numbers carries a `source` and an `evidence` grade for the numbers in it: `measured` (somebody
timed it), `calibrated` (fitted to measurements), `data sheet` (the vendor's figure), `assumed` (neither, and
the source says why). All link rates are per direction.
"""

# See [Note: annotations of tables].

from collections.abc import Sequence
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from zsim.arrays import Ints
from zsim.specs.cluster.collectives import CollectiveCosts
from zsim.specs.cluster.gpu import Gpu, PositiveRate
from zsim.specs.cluster.host_speeds import OffloadRates, default_offload_rates
from zsim.specs.cluster.network import Network
from zsim.specs.lazy_model import FiniteTable, Fraction, StrictTable, Table
from zsim.units import Bytes, BytesPerSecond, Seconds, format_setting


class NodeLink(Table):
    """The links between the GPUs of a node.

    With `switch` every GPU has `bandwidth` into and out of a non-blocking crossbar (NVSwitch). With `mesh`
    every GPU has `bandwidth` in all, spread evenly over direct links to the other GPUs. With `none` GPUs talk
    over PCIe. An NVL72 is one domain of 18 trays of 4 GPUs.
    """

    kind: Literal["switch", "mesh", "none"] = Field(
        description="a switch between all GPUs, direct links to each, or none (PCIe)"
    )
    bandwidth: BytesPerSecond = Field(default=0.0, description="of one GPU, out of it and into it")
    efficiency: Fraction = Field(default=1.0, description="what a large collective reaches of the bandwidth")
    latency: Seconds = Field(default=0.0, description="of a message between two GPUs")
    nodes_per_domain: int = Field(
        default=1, gt=0, strict=True, description="nodes that one switched domain spans"
    )

    @model_validator(mode="after")
    def _check_nodes_per_domain(self) -> Self:
        if self.kind != "none" and self.bandwidth <= 0:
            raise ValueError(f"bandwidth: kind '{self.kind}' needs one above 0")
        if self.nodes_per_domain > 1 and self.kind != "switch":
            raise ValueError(f"nodes_per_domain: only kind 'switch' spans nodes, found '{self.kind}'")
        return self

    def segment(self, num_nodes: int) -> int:
        """The nodes that a job of `num_nodes` has in each domain.

        A job that one domain does not hold is placed in segments of equal size, the largest that divide its
        nodes, as Slurm's `--segment` does for NVIDIA's own runs: 256 trays of an NVL72 are 16 segments of 16,
        not 14 of 18 and a rest of 4 (NVIDIA-NeMo/Megatron-Bridge 067f987d,
        scripts/performance/utils/executors.py). Where only segments under half a domain divide them, domains
        are filled one after the other.
        """
        domain_nodes = self.nodes_per_domain
        if num_nodes <= domain_nodes:
            return domain_nodes
        sizes = range(domain_nodes, domain_nodes // 2, -1)
        return next((size for size in sizes if num_nodes % size == 0), domain_nodes)


class Pcie(Table):
    """PCIe. Each GPU has a link to a switch, and `gpus_per_switch` GPUs share one uplink to the host."""

    bandwidth: PositiveRate = Field(description="of one GPU's slot, in each direction")
    efficiency: Fraction = Field(description="what a large copy reaches of the bandwidth")
    latency: Seconds = Field(description="of a copy")
    gpus_per_switch: int = Field(default=1, gt=0, description="GPUs that share one uplink to the host")
    peer_to_peer: bool = Field(default=True, description="GPUs copy to one another without the host's memory")


class C2c(Table):
    """A link between a GPU's memory and its CPU's that takes the place of PCIe for copies (NVLink-C2C).

    Network cards and drives stay on the CPU's PCIe. Memory that is not page-locked crosses the link as fast,
    since a GPU reads it through the CPU's page tables (CUDA's hardware coherency), and no driver's buffer is
    between.
    """

    bandwidth: PositiveRate = Field(description="of one GPU, in each direction")
    to_gpu_efficiency: Fraction = Field(description="what a large copy to the GPU reaches of the bandwidth")
    from_gpu_efficiency: Fraction = Field(description="what one from the GPU reaches")
    latency: Seconds = Field(description="of a copy")


class Nic(Table):
    """Network cards of one node. GPU i uses card i * per_node // gpus."""

    per_node: int = Field(
        gt=0, le=10**4, description="network cards of a node; GPU i uses card i * per_node // gpus_per_node"
    )
    bandwidth: PositiveRate = Field(description="of one card, in each direction")
    efficiency: Fraction = Field(description="what a large message reaches of the bandwidth")
    latency: Seconds = Field(description="of a message, in both cards together")
    gpudirect: bool = Field(default=True, description="cards read GPU memory without the host's")
    attached: Literal["host", "switch"] = Field(
        default="switch",
        description="to the host, or to the GPUs' PCIe switches, whose uplinks then carry bytes twice where "
        "there is no GPUDirect",
    )


class HostDevice(Table):
    """The CPU side of one node.

    `launch_queue` is about 1000 on CUDA, as measured by a user (stackoverflow.com/questions/53970187).
    `pinned_limit` may be a locked-memory limit or a pool.
    """

    cores: int = Field(gt=0, description="cores of a node")
    memory: Bytes = Field(description="of a node")
    memory_bandwidth: PositiveRate = Field(description="of a node, reads and writes together")
    seconds_per_launch: Seconds = Field(description="host time to launch a kernel")
    launch_queue: int = Field(
        default=1000, gt=0, description="launches that a stream queues before the host waits"
    )
    overhead_factor: float = Field(default=1.0, gt=0, description="scales the frameworks' host costs")
    cpu: str | None = Field(
        default=None,
        description='processor by its name in lscpu ("EPYC 7763"); sets seconds_per_launch and '
        "overhead_factor of a file that extends another without them, by single-thread ratings; left out: "
        "they are as in that file",
    )
    sockets: int = Field(
        default=1, gt=0, strict=True, description="sockets, which share cores, memory and GPUs evenly"
    )
    socket_bandwidth: BytesPerSecond | None = Field(
        default=None, description="from one socket to the others; left out: one socket, which needs none"
    )
    pinned_limit: Bytes | None = Field(
        default=None, description="page-locked memory of a node in all; left out: no limit"
    )

    @model_validator(mode="after")
    def _check_socket_bandwidth(self) -> Self:
        if self.sockets > 1 and not self.socket_bandwidth:
            raise ValueError(f"socket_bandwidth: {self.sockets} sockets need one above 0 between them")
        return self


class Nvme(Table):
    """Drives of one node, striped (RAID0). Capacity and rates are per drive.

    Drives at the "switch" are spread evenly over the GPUs' PCIe switches. `write_cache` and
    `sustained_write_bandwidth` are stated both or neither.
    """

    drives: int = Field(ge=0, description="drives of a node, striped")
    capacity: Bytes = Field(description="of one drive")
    read_bandwidth: PositiveRate = Field(description="of one drive")
    write_bandwidth: BytesPerSecond = Field(description="of one drive")
    efficiency: Fraction = Field(default=1.0, description="what asynchronous I/O reaches of the bandwidth")
    read_latency: Seconds = Field(default=1e-4, description="of a read")
    write_latency: Seconds = Field(default=3e-5, description="of a write")
    mixed_overlap: float = Field(
        default=1.0,
        ge=1,
        le=2,
        description="rate of simultaneous reads and writes over one alone: 1 to 2",
    )
    attached: Literal["host", "switch"] = Field(
        default="host", description="to the host, or under the GPUs' PCIe switches"
    )
    write_cache: Bytes | None = Field(
        default=None,
        description="bytes that a drive takes at its full rate; left out: its full rate at any size",
    )
    sustained_write_bandwidth: BytesPerSecond | None = Field(
        default=None, description="of one drive, beyond its cache; left out: its full rate at any size"
    )


class FrameworkMemory(Table):
    """GPU memory outside torch's allocator, and the fraction that the allocator cannot use."""

    context: Bytes = Field(description="the CUDA context and the framework's libraries, per GPU")
    communicator: Bytes = Field(description="buffers of a communicator, per GPU")
    pair_communicator: Bytes | None = Field(
        default=None, description="those of two GPUs of one node, per GPU; left out: as any other's"
    )
    network_communicator: Bytes | None = Field(
        default=None, description="those with one GPU of each node, per GPU; left out: as any other's"
    )
    exchange_peer: Bytes = Field(
        default=0,
        description="added to an all-to-all communicator, for every other GPU of the node",
    )
    least_communicator: Bytes | None = Field(
        default=None,
        description="what a communicator may take at least, where sources disagree; left out: communicator",
    )
    allocator_margin: float = Field(ge=0, lt=1, description="reserved but unusable, fraction of allocated")


class NodeType(StrictTable):
    """`count` identical nodes in a row: their GPU, and the links and the host around it."""

    name: str = Field(description="name of the GPU, or of the cluster file that the nodes are like")
    count: int = Field(gt=0, le=2**20, strict=True, description="how many nodes in a row are of this type")
    gpu: Gpu = Field(description="their GPU")
    gpus_per_node: int = Field(gt=0, description="GPUs of such a node")
    node_link: NodeLink = Field(description="links between their GPUs")
    pcie: Pcie = Field(description="links between GPUs and host")
    nic: Nic = Field(description="network cards")
    host: HostDevice = Field(description="processor and memory")

    @property
    def layout(self) -> dict[str, object]:
        """The layout of a node's parts, by key, which all nodes of one cluster have in common."""
        layout: dict[str, object] = {
            "gpus_per_node": self.gpus_per_node,
            "node_link.kind": self.node_link.kind,
            "node_link.nodes_per_domain": self.node_link.nodes_per_domain,
            "nic.gpudirect": self.nic.gpudirect,
            "nic.attached": self.nic.attached,
        }
        if self.node_link.kind == "none":
            layout["pcie.peer_to_peer"] = self.pcie.peer_to_peer
        return layout


class Cluster(FiniteTable):
    """A cluster (a file in `topologies/`). `gpu` is resolved by the loader.

    Its nodes are identical, unless `nodes` lists several types. Then the cluster has as many nodes as these,
    in this order, and `gpu`, `node_link`, `pcie`, `nic` and `host` are those of the first.
    """

    schema_version: Literal[1] = Field(alias="schema", description="the version of the file's format")
    name: str = Field(description="the cluster's name in reports")
    description: str = Field(description="one line about it")
    gpu: Gpu = Field(description="the GPU of every node")
    gpus_per_node: int = Field(gt=0, description="GPUs of a node")
    node_link: NodeLink = Field(description="links between the GPUs of a node")
    pcie: Pcie = Field(description="links between GPUs and host")
    nic: Nic = Field(description="network cards")
    network: Network = Field(description="the fabric between the nodes")
    collectives: CollectiveCosts = Field(description="costs of collectives besides their bytes")
    host: HostDevice = Field(description="processor and memory of a node")
    c2c: C2c | None = Field(
        default=None, description="links between GPUs and host memory; left out: copies cross PCIe"
    )
    nvme: Nvme | None = Field(default=None, description="drives of a node")
    offload: OffloadRates = Field(
        default_factory=default_offload_rates, description="what the host reaches with offloaded work"
    )
    framework_memory: FrameworkMemory = Field(description="GPU memory outside torch's allocator")
    nodes: tuple[NodeType, ...] = Field(
        default=(), description="nodes of several types, in the order of ranks"
    )

    @model_validator(mode="after")
    def _check_collectives_backend(self) -> Self:
        backend = self.collectives.backend
        if self.gpu.vendor == "other" and backend in ("nccl", "rccl"):
            raise ValueError(
                f"collectives.backend: '{backend}' does not run on GPU '{self.gpu.name}' of vendor 'other'; "
                "expected 'other', with [collectives.protocols] of its own library"
            )
        return self

    @model_validator(mode="after")
    def _check_equal_layouts(self) -> Self:
        for node in self.nodes[1:]:
            vendors = [self.nodes[0].gpu.vendor, node.gpu.vendor]
            if vendors[0] != vendors[1]:
                raise ValueError(
                    f"nodes: '{node.name}' has GPUs of vendor '{vendors[1]}', but '{self.nodes[0].name}' of "
                    f"'{vendors[0]}'; their collective libraries do not talk to each other"
                )
            for key, value in node.layout.items():
                expected = self.nodes[0].layout.get(key)
                if value != expected:
                    raise ValueError(
                        f"nodes: '{node.name}' has {key} {format_setting(value)}, but '{self.nodes[0].name}' "
                        f"{format_setting(expected)}; nodes of one cluster may differ in their GPU, in the "
                        "rates and "
                        "latencies of their links, in their cards and in their host, but not in this"
                    )
        return self

    @property
    def copy_bandwidth(self) -> float:
        """Bytes per second of the link over which a GPU copies to and from host memory, in one direction."""
        return self.pcie.bandwidth if self.c2c is None else self.c2c.bandwidth

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPU of each type of nodes. One GPU where all nodes are identical."""
        return tuple(node.gpu for node in self.nodes) or (self.gpu,)

    @property
    def hosts(self) -> tuple[HostDevice, ...]:
        """The host of each type of nodes. One host where all nodes are identical."""
        return tuple(node.host for node in self.nodes) or (self.host,)

    @property
    def node_type_indices(self) -> Ints:
        """The index in `nodes` of the type of each node. Empty where all nodes are identical."""
        return np.repeat(np.arange(len(self.nodes)), [node.count for node in self.nodes])

    @property
    def default_precision(self) -> Literal["bf16", "fp16"]:
        """bf16 where all GPUs have it, else fp16."""
        return "bf16" if all(gpu.peak.bf16 is not None for gpu in self.gpus) else "fp16"

    @property
    def gpu_label(self) -> str:
        """The names of its GPUs."""
        return " + ".join(dict.fromkeys(gpu.name for gpu in self.gpus))

    def replace_gpus(self, gpus: Sequence[Gpu]) -> Self:
        """The cluster with other GPUs, in the order of `self.gpus`."""
        nodes = tuple(
            node.model_copy(update={"gpu": gpu}) for node, gpu in zip(self.nodes, gpus, strict=False)
        )
        return self.model_copy(update={"gpu": gpus[0], "nodes": nodes})

    @property
    def extra_link_seconds(self) -> tuple[float, float]:
        """Seconds by which link latencies exceed those of the measured rounds: (inside nodes, between
        nodes).
        """
        measured = self.collectives.measured_on
        if measured is None:
            return 0.0, 0.0
        extra_between_nodes = self.nic.latency + self.network.latency - measured.nic - measured.network
        return max(0.0, self.node_link.latency - measured.node_link), max(0.0, extra_between_nodes)
