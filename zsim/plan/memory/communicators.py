"""GPU memory of NCCL's communicators: buffers by channel and connection.

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

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from zsim.arrays import Ints, unique
from zsim.plan.ops import Collective, Plan, Program
from zsim.specs.cluster.cluster import FrameworkMemory
from zsim.specs.experiment.job import Job

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
