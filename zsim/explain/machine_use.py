"""Load of a step on links and on the resources of offloading."""

from __future__ import annotations

from zsim.engine.simulate import Outcome
from zsim.plan.memory.capacity import pinned_bytes
from zsim.report.offload import TierRow
from zsim.report.report import MachineUse
from zsim.report.traffic import SentRow, TrafficRow, reported_group


def machine_use(outcome: Outcome) -> MachineUse:
    """Bytes by class of links, by phase and collective, and by tier of memory."""
    return MachineUse(
        traffic=_traffic(outcome),
        sent=_sent(outcome),
        tiers=_tiers(outcome),
        limits=outcome.limits,
        pinned_bytes=pinned_bytes(outcome.job, outcome.plan),
    )


def _traffic(outcome: Outcome) -> list[TrafficRow]:
    """One GPU's share of the bytes on each class of links, and the maximum utilisation of a link."""
    seconds = outcome.trace.step_seconds
    rows = []
    offload_traffic = {row.name: row for row in outcome.devices}
    for name, load in outcome.traffic.items():
        link_class = outcome.topology.classes[name]
        per_gpu = load.total_bytes / outcome.job.world_size
        busy = load.fullest_bytes / (link_class.capacity * seconds)
        if name in offload_traffic:  # offloading uses these links too
            per_gpu += offload_traffic[name].per_rank
            busy += offload_traffic[name].utilisation_fraction
        if per_gpu > 0:
            rows.append(TrafficRow(name, per_gpu, busy))
    return rows


def _sent(outcome: Outcome) -> list[SentRow]:
    groups = outcome.plan.groups
    bytes_of_key: dict[tuple[str, str, str, int], tuple[float, float]] = {}
    for (phase, kind, group), (within, between) in outcome.sent_bytes.items():
        key = phase, kind, reported_group(group), groups[group].size
        totals_before = bytes_of_key.get(key, (0.0, 0.0))
        bytes_of_key[key] = totals_before[0] + within, totals_before[1] + between
    return [SentRow(*key, *sent) for key, sent in bytes_of_key.items()]


_TIERS = {
    "pcie_down": "PCIe to the GPU", "pcie_up": "PCIe from the GPU", "uplink_down": "PCIe uplink, down",
    "uplink_up": "PCIe uplink, up", "dram": "host memory", "socket_out": "between sockets",
    "cpu": "CPU cores", "drive_read": "NVMe read", "drive_write": "NVMe write",
    "drive_time": "NVMe, read and write",
}  # fmt: skip


def _tiers(outcome: Outcome) -> list[TierRow]:
    """Load of offloading on each kind of resource. Resources of a single rank (queues) are left out."""
    return [
        TierRow(_TIERS[row.name], None if row.is_time else row.per_rank, row.utilisation_fraction)
        for row in outcome.devices
        if row.name in _TIERS
    ]
