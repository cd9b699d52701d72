"""Costs of offloading: the stall by cause, and the bytes that each tier carried.

# [Note: the cause of a stall]
A wait for a copy, the CPU or a drive is attributed to the resource that bounds this kind of work when nothing
else runs. A wait for a copy counts for PCIe or C2C, or for host memory where that is slower for all GPUs of a
node at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zsim.report.breakdown import Breakdown
from zsim.trace.trace import Trace, kind_mask

CAUSES = ("PCIe", "C2C", "DRAM", "CPU step", "drive read", "drive write")
_BY_KIND = {
    "h2d": "PCIe", "d2h": "PCIe", "cpu": "CPU step", "nvme_read": "drive read", "nvme_write": "drive write",
}  # fmt: skip
_BY_RESOURCE = {
    "dram": "DRAM", "socket_out": "DRAM", "socket_in": "DRAM",
    "pcie_up": "PCIe", "pcie_down": "PCIe", "uplink_up": "PCIe", "uplink_down": "PCIe",
    "c2c_up": "C2C", "c2c_down": "C2C",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TierRow:
    """One kind of resource: bytes that one rank puts on it per step (None for cores, which are shared by
    time), and its utilisation as a fraction of the step."""

    tier: str
    bytes_per_rank: float | None
    utilisation_fraction: float


@dataclass(frozen=True, slots=True)
class OffloadSection:
    """The report's section on offloading."""

    stall_seconds: Mapping[str, float]
    moved_bytes: Mapping[str, int]
    """Bytes of one rank's step by kind of span."""
    tiers: tuple[TierRow, ...]
    pinned_bytes: int = 0
    """Maximum page-locked host memory of a node."""
    range_seconds: tuple[float, float] | None = None
    """The step with all inputs of offloading at the fast and at the slow end of the range of their evidence.
    None: not simulated.
    """


def offload_section(
    trace: Trace,
    breakdown: Breakdown,
    rank: int,
    limits: Mapping[str, str],
    tiers: Sequence[TierRow],
    pinned_bytes: int = 0,
) -> OffloadSection | None:
    """The section on offloading. None without offloaded work.

    `limits` is the resource that bounds each kind of span, see [Note: the cause of a stall]. The causes add
    up to the breakdown's offload stall.
    """
    if not trace.infos.memoize(kind_mask, frozenset(_BY_KIND)).any():
        return None
    moved_bytes = moved_bytes_of(trace, rank)
    if not moved_bytes:
        return None
    stall_seconds = dict.fromkeys(CAUSES, 0.0)
    infos, seconds = breakdown.waits.select_cause("offload_stall")
    for info, wait_seconds in zip(infos.tolist(), seconds.tolist(), strict=True):
        kind = trace.infos[info].kind
        stall_seconds[_BY_RESOURCE.get(limits.get(kind, ""), _BY_KIND[kind])] += wait_seconds
    if not stall_seconds["C2C"]:
        del stall_seconds["C2C"]
    return OffloadSection(stall_seconds, moved_bytes, tuple(tiers), pinned_bytes)


def moved_bytes_of(trace: Trace, rank: int) -> dict[str, int]:
    """Bytes of offloaded work of `rank` by kind of span."""
    moved_bytes: dict[str, int] = {}
    for _, info, _, _ in trace.select_rank(rank).rows():
        if info.kind in _BY_KIND:
            moved_bytes[info.kind] = moved_bytes.get(info.kind, 0) + info.bytes
    return moved_bytes
