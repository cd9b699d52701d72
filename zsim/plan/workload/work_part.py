"""Ops of a module's work in one direction, those of context parallelism's communication among them."""

from __future__ import annotations

from typing import NamedTuple

from zsim.cost.kernels.kernel import Kernel
from zsim.plan.builder import COMPUTE
from zsim.plan.ops import Collective, CollectiveKind, Kernels, PointToPoint


class WorkPart(NamedTuple):
    """One op of a module, or (`work` None) a wait by itself."""

    work: Kernels | Collective | PointToPoint | None
    name: str = ""
    stream: str = COMPUTE
    follows: str = ""
    """The stream whose work so far the op waits for."""


CONTEXT = "context"  # the process group, and the stream of its communicator
HEADS, RING = "context heads", "context ring"  # the groups of "a2a+p2p"
GRADIENTS = "context gradients"  # the same communicator; waited for by themselves


def compute_part(name: str, *kernels: Kernel) -> WorkPart:
    """Kernels on the compute stream."""
    return WorkPart(Kernels(kernels), name)


def wait_for_stream(stream: str = CONTEXT) -> WorkPart:
    """The compute stream waits for what `stream` has transferred so far."""
    return WorkPart(None, follows=stream)


def inline_collective(
    kind: CollectiveKind, num_bytes: int, dtype: str, name: str, group: str = CONTEXT
) -> WorkPart:
    """A collective in the compute stream."""
    return WorkPart(Collective(kind, num_bytes, dtype, group), name)


def concurrent_collective(
    kind: CollectiveKind, num_bytes: int, dtype: str, name: str, group: str = CONTEXT
) -> WorkPart:
    """A collective on the group's stream, after what is computed so far."""
    return WorkPart(Collective(kind, num_bytes, dtype, group), name, CONTEXT, COMPUTE)
