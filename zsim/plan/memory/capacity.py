"""Whether a job fits, from its plan only: memory follows the order of the host program, not the clock.

# [Note: memory of NCCL's communicators]
A communicator has a buffer per channel and GPU that sends to this one: 4 MiB for Simple, 4.7 for LL128, and a
little for LL. NCCL opens as many channels as the links between its GPUs can feed: some two dozen inside a
node with NVSwitch, two to four where it has the network alone (one GPU of each node). A ring and a tree in a
node have two neighbours, of which a pair has only one. An exchange of all to all connects every pair of GPUs
directly, with as many channels again. Releases from 2.22 on connect only what is used
(`NCCL_RUNTIME_CONNECT`): a ring that gathers and reduces needs half of it.

Source: NCCL 2.10 to 2.27, src/init.cc, src/graph/connect.cc, src/transport/p2p.cc. The figures and their
sources are in `[framework_memory]` of the cluster files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from zsim.arrays import Ints, unique
from zsim.plan.memory.tensors import device_peaks, pinned_peak
from zsim.plan.node_types import gpu_of
from zsim.plan.ops import Collective, Device, Memory, Plan, Program
from zsim.specs.cluster.cluster import Cluster, FrameworkMemory, HostDevice
from zsim.specs.cluster.gpu import Gpu
from zsim.specs.experiment.job import Job
from zsim.specs.strategy.training import NUM_HANDLES, workspace_bytes


def usable_bytes(cluster: Cluster, gpu: Gpu | None = None) -> int:
    """GPU bytes that tensors and framework can use: the capacity that the driver reports, less the margin. It
    is that of `gpu`, by default of the smallest GPU of the cluster.

    The allocator reserves (1 + margin) times the allocated bytes, so of a capacity C with F bytes of
    framework memory (C - F) / (1 + margin) + F are usable. F is small, and C / (1 + margin) is returned.
    """
    capacity = min(device.memory.capacity for device in cluster.gpus) if gpu is None else gpu.memory.capacity
    return int(capacity / (1 + cluster.framework_memory.allocator_margin))


def usable_bytes_of_fullest_gpu(job: Job, plan: Plan) -> int:
    """`usable_bytes` of the GPU of the ranks with the highest peak."""
    if len(job.types) == 1:
        return usable_bytes(job.cluster, job.cluster.gpus[job.types[0]])
    peaks = [program.memoize(device_peaks).get("gpu", 0) for program in plan.programs]
    return usable_bytes(job.cluster, gpu_of(job, plan, int(np.argmax(peaks))))


def excess_bytes(job: Job, plan: Plan, *, includes_margin: bool = True) -> int:
    """Bytes by which the fullest rank's step exceeds the capacity of its GPU, or with `includes_margin` its
    usable bytes. It is negative if all ranks have room.
    """
    excess = []
    for number in range(len(plan.programs)):
        gpu = gpu_of(job, plan, number)
        limit = usable_bytes(job.cluster, gpu) if includes_margin else gpu.memory.capacity
        excess.append(program_peak_bytes(job, plan, number) - limit)
    return max(excess)


def program_peak_bytes(job: Job, plan: Plan, number: int) -> int:
    """Maximum GPU bytes of a program's ranks over a step."""
    peak = plan.programs[number].memoize(device_peaks).get("gpu", 0)
    return peak + framework_memory(job, plan, number).bytes


def framework_memory(job: Job, plan: Plan, program: int = 0) -> Memory:
    """The CUDA context, cuBLAS's workspaces unless they are in the plan, and the buffers of one communicator
    per process group of a program's ranks, see zsim.plan.memory.capacity."""
    memory = job.cluster.framework_memory
    libraries = memory.context + workspaces_bytes(job, gpu_of(job, plan, program))
    return Memory("framework", libraries + communicator_bytes(job, plan, program, memory))


def workspaces_bytes(job: Job, gpu: Gpu) -> int:
    """Bytes of cuBLAS's workspaces that the plan does not hold. They are 0 on GPUs that are not NVIDIA's."""
    if job.strategy.plans_workspaces or gpu.compute_capability is None:
        return 0
    return NUM_HANDLES * workspace_bytes(gpu.compute_capability)


def framework_bytes_range(job: Job, plan: Plan, program: int = 0) -> tuple[int, int]:
    """The least and the most that `framework_memory` may be, where sources disagree."""
    memory, highest = job.cluster.framework_memory, framework_memory(job, plan, program).bytes
    communicators = communicator_bytes(job, plan, program, memory)
    return highest - communicators + least_communicator_bytes(job, plan, program, memory), highest


def deciding_framework_range(job: Job, plan: Plan) -> tuple[int, int] | None:
    """`framework_bytes_range` of the fullest rank, if it decides whether that rank has room with the
    allocator's margin. Otherwise None.
    """
    excess = {
        program_peak_bytes(job, plan, number) - usable_bytes(job.cluster, gpu_of(job, plan, number)): number
        for number in range(len(plan.programs))
    }
    largest = max(excess)
    lowest, highest = framework_bytes_range(job, plan, excess[largest])
    return (lowest, highest) if 0 < largest <= highest - lowest else None


def resident_bytes(job: Job, plan: Plan, device: Device) -> int:
    """Bytes held before a step: on the fullest GPU, or by all ranks of the fullest node on host or drives."""
    bytes_per_program = [
        sum(memory.bytes for memory in program.resident if memory.device == device)
        for program in plan.programs
    ]
    if device != "gpu":
        return _fullest_node_bytes(job, plan, bytes_per_program)
    return max(
        bytes + framework_memory(job, plan, number).bytes for number, bytes in enumerate(bytes_per_program)
    )


@dataclass(frozen=True, slots=True)
class ResidentMemory:
    """Bytes that the fullest GPU and a node's host and drives hold before a step, whatever the batch, and
    their limits."""

    bytes: Mapping[Device, int]
    limits: Mapping[Device, int]

    @property
    def is_too_much(self) -> bool:
        return any(self.bytes[device] > self.limits[device] for device in self.bytes)


def resident_memory(job: Job, plan: Plan) -> ResidentMemory:
    """The bytes that a job holds before a step."""
    limits: dict[Device, int] = {"gpu": usable_bytes(job.cluster)}
    limits |= {device: limit or 0 for device, limit in node_capacity_bytes(job, plan).items()}
    return ResidentMemory({device: resident_bytes(job, plan, device) for device in limits}, limits)


def step_peak_bytes(job: Job, plan: Plan) -> int:
    """Maximum GPU bytes of the fullest rank over a step."""
    return max(program_peak_bytes(job, plan, number) for number in range(len(plan.programs)))


def peak_bytes(job: Job, plan: Plan) -> int:
    """Maximum GPU bytes of the fullest rank over a step, or before the first step."""
    return max(step_peak_bytes(job, plan), startup_bytes(job, plan))


def startup_bytes(job: Job, plan: Plan) -> int:
    """GPU bytes of the fullest rank before the first step, 0 if no program states them."""
    return max(program_startup_bytes(job, plan, number) for number in range(len(plan.programs)))


def program_startup_bytes(job: Job, plan: Plan, number: int) -> int:
    """GPU bytes of a program's ranks before the first step, 0 if it does not state them."""
    startup = plan.programs[number].startup_bytes
    return startup + framework_memory(job, plan, number).bytes if startup else 0


def node_peak_bytes(job: Job, plan: Plan, device: Device) -> int:
    """Maximum host or NVMe bytes of the fullest node over a step: the sum of its ranks' maxima. On hosts of
    several types it is that of the node with the least memory left.
    """
    peaks = _peaks(plan, device)
    return _least_room(job, plan, peaks)[0] if device == "host" else _fullest_node_bytes(job, plan, peaks)


def _peaks(plan: Plan, device: Device) -> list[int]:
    """The maximum of a rank's bytes on a device over a step, program by program."""
    return [program.memoize(device_peaks).get(device, 0) for program in plan.programs]


def pinned_bytes(job: Job, plan: Plan) -> int:
    """Maximum page-locked host bytes of the fullest node over a step: the sum of its ranks' maxima."""
    return _fullest_node_bytes(job, plan, [program.memoize(pinned_peak) for program in plan.programs])


def pinned_bytes_per_host(job: Job, plan: Plan) -> list[tuple[int, HostDevice]]:
    """`pinned_bytes` of the fullest node of each type, and its host."""
    return _fullest_per_type(job, plan, [program.memoize(pinned_peak) for program in plan.programs])


def _fullest_node_bytes(job: Job, plan: Plan, per_program: list[int]) -> int:
    """The sum of `per_program` over the ranks of a node, for the fullest node."""
    return max(bytes for bytes, _ in _fullest_per_type(job, plan, per_program))


def _least_room(job: Job, plan: Plan, per_program: list[int]) -> tuple[int, int]:
    """The sum of `per_program` over a node's ranks and the node's host memory, for the node that has the
    least memory left.
    """
    nodes = _fullest_per_type(job, plan, per_program)
    return max(((bytes, host.memory) for bytes, host in nodes), key=lambda node: node[0] - node[1])


def _fullest_per_type(job: Job, plan: Plan, per_program: list[int]) -> list[tuple[int, HostDevice]]:
    """The sum of `per_program` over the ranks of a node and the node's host, for the fullest node of each
    type.
    """
    hosts = job.cluster.hosts
    if len(per_program) == 1:
        return [(per_program[0] * job.gpus_per_node, hosts[job.types[0]])]
    counts = np.array(job.placement.gpus, dtype=np.int64)
    first_ranks: Ints = np.cumsum(counts) - counts
    per_node = np.add.reduceat(np.array(per_program)[plan.program_of], first_ranks)
    if len(job.types) == 1:
        return [(int(per_node.max()), hosts[job.types[0]])]
    types = job.cluster.node_type_indices[list(job.placement.nodes)]
    return [(int(per_node[types == kind].max()), hosts[kind]) for kind in job.types]


def pinned_limit_violation(job: Job, plan: Plan) -> tuple[int, int] | None:
    """Host bytes that the plan page-locks on a node and the limit there, if the bytes exceed the limit.
    Otherwise None.
    """
    for bytes, host in pinned_bytes_per_host(job, plan):
        if host.pinned_limit is not None and bytes > host.pinned_limit:
            return bytes, host.pinned_limit
    return None


def node_capacity_bytes(job: Job, plan: Plan) -> dict[Device, int | None]:
    """The capacity in bytes of a node's host memory and of its drives (None without drives). The memory is
    that of the node of `node_peak_bytes`.
    """
    nvme = job.cluster.nvme
    return {
        "host": _least_room(job, plan, _peaks(plan, "host"))[1],
        "nvme": nvme.drives * nvme.capacity if nvme else None,
    }


def fits(job: Job, plan: Plan) -> bool:
    """Whether a job's plan fits on every tier of its GPUs and nodes."""
    return fill_ratio(job, plan) <= 1


def fill_ratio(job: Job, plan: Plan) -> float:
    """Bytes over usable bytes of the tier that is fullest, over all GPUs and nodes. Above 1 the plan does not
    fit.
    """
    return largest_ratio(tier_usage(job, plan))


def largest_ratio(usage: Iterable[tuple[int, int]]) -> float:
    """The largest of bytes over usable bytes, of tiers that hold any."""
    return max(bytes / limit if limit else inf for bytes, limit in usage if bytes)


def tier_usage(job: Job, plan: Plan) -> list[tuple[int, int]]:
    """Maximum bytes and usable bytes of every tier: page-locked and all host memory of each type of node, the
    drives, and the GPU of each program, in this order.
    """
    nodes = _fullest_per_type(job, plan, _peaks(plan, "host"))
    pinned = pinned_bytes_per_host(job, plan)
    usage = [(bytes, host.pinned_limit) for bytes, host in pinned if host.pinned_limit is not None]
    usage += [(bytes, host.memory) for bytes, host in nodes]
    usage.append((node_peak_bytes(job, plan, "nvme"), node_capacity_bytes(job, plan)["nvme"] or 0))
    for number in range(len(plan.programs)):
        peak = max(program_peak_bytes(job, plan, number), program_startup_bytes(job, plan, number))
        usage.append((peak, usable_bytes(job.cluster, gpu_of(job, plan, number))))
    return usage


_CUSTOM_KERNEL_DISPATCHERS = ("deepep", "hybridep")  # dispatchers whose exchanges are not NCCL's


class _Communicator(NamedTuple):
    """A communicator of one rank."""

    is_one_gpu_per_node: bool
    """Whether it has only one GPU of each node (or domain of nodes)."""
    ranks: int
    num_exchange_peers: int
    """The number of other GPUs of the rank's node in it, if it exchanges all to all, else 0."""


def communicator_bytes(job: Job, plan: Plan, program: int, memory: FrameworkMemory) -> int:
    """Buffers of the communicators of a program's ranks."""
    return sum(_bytes(communicator, memory) for communicator in _communicators(job, plan, program))


def least_communicator_bytes(job: Job, plan: Plan, program: int, memory: FrameworkMemory) -> int:
    """The same where each is as small as a source has it."""
    least = memory.least_communicator
    sizes = [_bytes(communicator, memory) for communicator in _communicators(job, plan, program)]
    return sum(sizes if least is None else (min(bytes, least) for bytes in sizes))


def _bytes(communicator: _Communicator, memory: FrameworkMemory) -> int:
    exchange = communicator.num_exchange_peers * memory.exchange_peer
    if communicator.is_one_gpu_per_node and memory.network_communicator is not None:
        return memory.network_communicator + exchange
    if (
        communicator.ranks == 2
        and not communicator.is_one_gpu_per_node
        and memory.pair_communicator is not None
    ):
        return memory.pair_communicator + exchange
    return memory.communicator + exchange


def _communicators(job: Job, plan: Plan, program: int) -> Iterator[_Communicator]:
    """The communicators of the first of a program's ranks."""
    rank = int(np.argmax(plan.program_of == program))
    gpus = job.placement.gpus
    nodes: Ints = np.repeat(np.arange(len(gpus)), gpus)
    domains = nodes // job.nodes_per_domain
    uses_nccl = job.parallelism.experts.dispatcher not in _CUSTOM_KERNEL_DISPATCHERS
    exchange_groups = plan.programs[program].memoize(_all_to_all_groups) if uses_nccl else frozenset()
    for name, group in plan.groups.items():
        if group.size == 1:
            continue
        for row in group.members[(group.members == rank).any(axis=1)]:
            member_domains = domains[row]
            num_local_peers = int((member_domains == domains[rank]).sum()) - 1
            num_peers = num_local_peers if name in exchange_groups else 0
            yield _Communicator(len(unique(member_domains)) == len(row), len(row), num_peers)


def _all_to_all_groups(program: Program) -> frozenset[str]:
    """The groups over which a program exchanges all to all."""
    payloads = (op.work for op in program.ops)
    return frozenset(
        payload.group
        for payload in payloads
        if isinstance(payload, Collective) and payload.kind == "all_to_all"
    )
