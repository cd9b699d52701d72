"""The share of the machine that other processes used during a measurement.

A time measured on a machine shared with other work says little. The indicator is cheap: the machine's busy
clock ticks less this process's, as a share of all clock ticks."""

from __future__ import annotations

import os
from pathlib import Path


class CpuLoad:
    """Counts clock ticks from its construction on."""

    def __init__(self) -> None:
        self.start = self._read()

    def since(self) -> tuple[float, float, float]:
        """Clock ticks since construction: (the machine's busy ones, all, this process's)."""
        busy, total, own = (after - before for before, after in zip(self.start, self._read(), strict=True))
        return busy, total, own

    @staticmethod
    def _read() -> tuple[float, float, float]:
        fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        idle, total = fields[3] + fields[4], sum(fields[:8])
        own = sum(os.times()[:2]) * os.sysconf("SC_CLK_TCK")
        return total - idle, total, own


def foreign_fraction(busy: float, total: float, own: float) -> float:
    """The share of the machine's time that was neither idle nor `own`; 0 where ticks are too coarse."""
    return round(max(0.0, busy - own) / max(1.0, total), 3)
