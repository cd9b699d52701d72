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

from zsim.arrays import Ints, distinct
from zsim.plan.ops import Collective, Plan, Program
from zsim.specs.cluster.cluster import FrameworkMemory
from zsim.specs.experiment.job import Job

_OWN_KERNELS = ("deepep", "hybridep")  # dispatchers whose exchanges are not NCCL's


class _Communicator(NamedTuple):
    """A communicator of one rank."""

    is_apart: bool
    """Whether it has only one GPU of each node (or domain of nodes)."""
    ranks: int
    num_exchanged: int
    """The number of other GPUs of the rank's node in it, if it exchanges all to all, else 0."""


def communicator_bytes(job: Job, plan: Plan, program: int, memory: FrameworkMemory) -> int:
    """Buffers of the communicators of a program's ranks."""
    return sum(_bytes(each, memory) for each in _communicators(job, plan, program))


def least_communicator_bytes(job: Job, plan: Plan, program: int, memory: FrameworkMemory) -> int:
    """The same where each is as small as a source has it."""
    least = memory.least_communicator
    each = [_bytes(one, memory) for one in _communicators(job, plan, program)]
    return sum(each if least is None else (min(bytes, least) for bytes in each))


def _bytes(communicator: _Communicator, memory: FrameworkMemory) -> int:
    exchange = communicator.num_exchanged * memory.exchange_peer
    if communicator.is_apart and memory.network_communicator is not None:
        return memory.network_communicator + exchange
    if communicator.ranks == 2 and not communicator.is_apart and memory.pair_communicator is not None:
        return memory.pair_communicator + exchange
    return memory.communicator + exchange


def _communicators(job: Job, plan: Plan, program: int) -> Iterator[_Communicator]:
    """The communicators of the first of a program's ranks."""
    rank = int(np.argmax(plan.program_of == program))
    gpus = job.placement.gpus
    nodes: Ints = np.repeat(np.arange(len(gpus)), gpus)
    domains = nodes // job.nodes_per_domain
    is_nccls = job.parallelism.experts.dispatcher not in _OWN_KERNELS
    exchanging = plan.programs[program].once(_exchanging) if is_nccls else frozenset()
    for name, group in plan.groups.items():
        if group.size == 1:
            continue
        for row in group.members[(group.members == rank).any(axis=1)]:
            places = domains[row]
            mates = int((places == domains[rank]).sum()) - 1
            exchanged = mates if name in exchanging else 0
            yield _Communicator(len(distinct(places)) == len(row), len(row), exchanged)


def _exchanging(program: Program) -> frozenset[str]:
    """The groups over which a program exchanges all to all."""
    works = (op.work for op in program.ops)
    return frozenset(
        work.group for work in works if isinstance(work, Collective) and work.kind == "all_to_all"
    )
