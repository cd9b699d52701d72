"""One op of a module's work in one direction."""

from __future__ import annotations

from typing import NamedTuple

from zsim.plan.builder import COMPUTE
from zsim.plan.ops import Collective, Kernels, PointToPoint


class WorkPart(NamedTuple):
    """One op of a module, or (`work` None) a wait by itself."""

    work: Kernels | Collective | PointToPoint | None
    name: str = ""
    stream: str = COMPUTE
    follows: str = ""
    """The stream whose work so far the op waits for."""
