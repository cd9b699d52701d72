"""Offloaded work of a plan as activities: the resources that each piece uses, and its latency."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import chain

import numpy as np

from zsim.devices.host import add_drives, add_host, copy_usage, drive_usage, host_work_usage
from zsim.devices.node_resources import NodePool, ResourceUsage
from zsim.errors import InputError
from zsim.fabric.aggregate import Extra
from zsim.fabric.communicators import Transfer
from zsim.fabric.fabric import Fabric
from zsim.fabric.folding.classes import RankClasses
from zsim.plan.ops import Copy, DriveIo, HostWork, OffloadWork, Plan, offload_kind
from zsim.specs.topology.topology import Topology


@dataclass(frozen=True, slots=True)
class DeviceTraffic:
    """Traffic of one class of resources over a step."""

    name: str
    per_rank: float
    """Mean bytes (or seconds, if `is_time`) per rank."""
    utilisation_fraction: float
    """Utilisation of the most utilised resource of the class over the step."""
    is_time: bool


class Offload:
    """The resources that offloaded work needs in addition to links, and the profile of every kind of work."""

    def __init__(self, topology: Topology, plan: Plan, classes: RankClasses) -> None:
        self._works_per_program = [program.offload_work for program in plan.programs]
        self._program_of = plan.program_of
        self.offload_works = list(chain.from_iterable(self._works_per_program))
        self.pool = NodePool(topology, classes.class_of_rank)
        self._ranks = classes.representatives
        self._nvme = topology.cluster.nvme
        self._transfers: dict[tuple[OffloadWork, int], Transfer] = {}
        self._samples: dict[Hashable, OffloadWork] = {}
        if not self.offload_works:
            return
        add_host(self.pool)
        drives = [work for work in self.offload_works if isinstance(work, DriveIo)]
        if drives:
            nvme = self._nvme
            if nvme is None or nvme.drives == 0:
                raise InputError(
                    f"cluster '{topology.cluster.name}' has no NVMe drives, and the strategy offloads to "
                    "nvme; expected a [nvme] table with drives, or device 'cpu'"
                )
            written_bytes = max(
                sum(
                    work.bytes
                    for work in program_works
                    if isinstance(work, DriveIo) and work.direction == "write"
                )
                for program_works in self._works_per_program
            )
            add_drives(self.pool, nvme, float(written_bytes * topology.gpus_per_node))
        for work in self.offload_works:
            self._samples.setdefault(_kind(work), work)

    def extra_resources(self) -> Extra:
        """Resources and usages to register along with the links. The keys are (kind of work, representative
        of a class).
        """
        usages = [
            ((kind, rank), usage.indices, usage.weights)
            for kind, work in self._samples.items()
            for rank in self._ranks
            for usage in [self._usage(work, rank)]
        ]
        return Extra(self.pool.capacities, usages)

    def _usage(self, work: OffloadWork, rank: int) -> ResourceUsage:
        if isinstance(work, Copy):
            return copy_usage(self.pool, work, rank)
        if isinstance(work, HostWork):
            return host_work_usage(self.pool, work, rank)
        assert self._nvme is not None
        return drive_usage(self.pool, self._nvme, work, rank)

    def transfer(self, work: OffloadWork, rank: int, fabric: Fabric) -> Transfer:
        """The work of a class, given by its representative `rank`, as a transfer on the fabric's pool."""
        transfer = self._transfers.get((work, rank))
        if transfer is None:
            profile = fabric.extra_profiles[_kind(work), rank]
            rate = min(fabric.pool.capacity[r] / w for r, w in profile.usage)
            latency = self._latency(work, rank)
            transfer = Transfer(latency, work.bytes, profile, "offload", "", latency + work.bytes / rate)
            self._transfers[work, rank] = transfer
        return transfer

    def _latency(self, work: OffloadWork, rank: int) -> float:
        if isinstance(work, Copy):
            cluster = self.pool.topology.cluster
            nodes = cluster.nodes
            if cluster.c2c is not None:
                return cluster.c2c.latency
            return (nodes[self.pool.type_of(rank)] if nodes else cluster).pcie.latency
        if isinstance(work, DriveIo):
            assert self._nvme is not None
            return self._nvme.read_latency if work.direction == "read" else self._nvme.write_latency
        return 0.0

    def limits(self) -> dict[str, str]:
        """Per kind of span, the class of resources that limits it when nothing else runs."""
        limits: dict[str, str] = {}
        for work in self._samples.values():
            usage = self._usage(work, 0)
            rates: dict[str, float] = {}
            for name, resource in self.pool.classes.items():
                inside = (usage.indices >= resource.first) & (usage.indices < resource.first + resource.count)
                if inside.any():
                    rates[name] = resource.capacity / float(usage.weights[inside].max())
            limits.setdefault(offload_kind(work), min(rates, key=lambda name: rates[name]))
        return limits

    def traffic(self, step_seconds: float) -> tuple[DeviceTraffic, ...]:
        """The traffic of each class of resources over a step of `step_seconds`, in the order of the
        classes."""
        capacities = np.concatenate([self.pool.topology.capacities(), self.pool.capacities])
        carried = np.zeros(len(capacities))
        per_kind: dict[tuple[int, Hashable], float] = {}
        for program, program_works in enumerate(self._works_per_program):
            for work in program_works:
                key = program, _kind(work)
                per_kind[key] = per_kind.get(key, 0.0) + work.bytes
        for (program, kind), total in per_kind.items():
            for rank in self._ranks:
                if self._program_of[rank] != program:
                    continue
                usage = self._usage(self._samples[kind], rank)
                carried[usage.indices] += usage.weights * total
        rows = []
        for name, resource in self.pool.classes.items():
            inside = slice(resource.first, resource.first + resource.count)
            class_total = float(carried[inside].sum())
            if class_total > 0:
                rows.append(
                    DeviceTraffic(
                        name,
                        class_total / self.pool.topology.world_size,
                        float((carried[inside] / (capacities[inside] * step_seconds)).max()),
                        resource.capacity <= 2.0,
                    )
                )
        return tuple(rows)


def _kind(work: OffloadWork) -> Hashable:
    """The key of a work's profile: all of its attributes except its size."""
    if isinstance(work, Copy):
        return work.direction, work.is_pinned
    if isinstance(work, HostWork):
        return "cpu", work.kind
    return work.direction, work.block_bytes, work.queue_depth, work.threads, work.is_direct
