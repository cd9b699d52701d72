"""The parts of attention over split sequences, by method and library."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from zsim.cost.kernels.context import SharedAttention
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.plan.workload.context import heads, te_gather, te_ring, torch_flex, torch_ring
from zsim.plan.workload.work_part import WorkPart
from zsim.specs.model.spec import Attention, ContextSharding

Parts = Callable[[SharedAttention], tuple[WorkPart, ...]]
_TE: Mapping[str, tuple[Parts, Parts]] = {
    "p2p": (te_ring.forward, te_ring.backward),
    "all-gather": (te_gather.forward, te_gather.backward),
}
_TORCH = torch_ring.forward, torch_ring.backward
_FLEX = torch_flex.forward, torch_flex.backward
_HEADS = heads.forward, heads.backward


def shared_forward(work: Attention, shape: BatchShape, options: WorkOptions) -> tuple[WorkPart, ...]:
    """The parts of attention's forward on one of the ranks that share its sequences. `shape` is the
    rank's.
    """
    shared = SharedAttention.of(work, shape, options)
    return _parts(shared.share)[0](shared)


def shared_backward(work: Attention, shape: BatchShape, options: WorkOptions) -> tuple[WorkPart, ...]:
    """The parts of attention's backward on one of the ranks that share its sequences. `shape` is the
    rank's.
    """
    shared = SharedAttention.of(work, shape, options)
    return _parts(shared.share)[1](shared)


def _parts(share: ContextSharding) -> tuple[Parts, Parts]:
    if share.library == "torch":
        return _FLEX if share.has_masks else _TORCH
    return _TE.get(share.method, _HEADS)
