"""A forward and a backward side by side, layer by layer: Megatron's overlap of experts' exchanges.

# [Note: one layer of each]
Every layer is cut into four nodes: all up to the exchange (attention, router, permutation), the dispatch, the
experts, the combination. A dense layer is the first alone. Both micro-batches' nodes are in order by events
of their own, on the compute stream or, dispatch and combination, on a stream for exchanges. The host issues:
backward's combination, forward's first node, backward's experts, forward's dispatch, the gradients of the
experts' weights and backward's dispatch, forward's experts and combination, backward's first node and the
gradients of its weights. Layers that only one of the two has run by themselves. Embedding, loss and what
belongs to neither stands around the layers. (`TransformerLayerSchedulePlan.run`,
`TransformerModelChunkSchedulePlan.run` of Megatron-LM d98e8a64
megatron/core/models/common/model_chunk_schedule_plan.py.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Literal

from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.ops import Phase
from zsim.plan.pipeline.schedules import Action, Overlap
from zsim.plan.walk import Walk
from zsim.plan.workload.workload import ModuleCall, Segment
from zsim.specs.model.experts import GroupedLinear
from zsim.specs.model.spec import Exchange

EXCHANGES = "expert exchanges"
Node = Literal["first", "dispatch", "experts", "combination"]
Place = tuple[str, Node]  # segment and node; the node of what stands around the layers is "first"


def nodes_of(segment: Segment) -> dict[str, Node]:
    """The node of every call of a layer, by name: see [Note: one layer of each]. The exchange of the rows'
    counts belongs to the first.
    """
    products = [n for n, call in enumerate(segment.calls) if isinstance(call.module.work, GroupedLinear)]
    moving = [n for n, call in enumerate(segment.calls) if _moves_rows(call)]
    ahead = [n for n in moving if products and n < products[0]]
    behind = [n for n in moving if products and n > products[-1]]
    found: dict[str, Node] = {}
    for n, call in enumerate(segment.calls):
        node: Node = "first"
        if ahead and behind and n >= ahead[0]:
            node = "dispatch" if n <= ahead[-1] else "experts" if n < behind[0] else "combination"
        found[call.name] = node
    return found


def _moves_rows(call: ModuleCall) -> bool:
    work = call.module.work
    return isinstance(work, Exchange) and work.forward == "all_to_all" and work.group.startswith("expert")


class PairedPass:
    """One of the two passes: its remaining calls, its current node, and the event of what it has issued."""

    def __init__(self, builder: PlanBuilder, walk: Walk, action: Action, *, is_delayed: bool) -> None:
        self.builder, self.walk, self.action = builder, walk, action
        self.phase: Phase = "forward" if action.kind == "F" else "backward"
        self.nodes: dict[str, Mapping[str, Node]] = {
            one.name: nodes_of(one) if one.kind == "block" else {} for one in walk.workload.segments
        }
        self.layers = [one.name for one in walk.workload.segments if one.kind == "block"]
        if self.phase == "backward":
            self.layers.reverse()
        self._is_delayed = is_delayed
        self._left: list[ModuleCall] = []
        self._event: int | None = None
        self._stream = COMPUTE
        self._calls: Iterator[ModuleCall] = iter(())
        self._next: ModuleCall | None = None

    def begin(self, calls: Iterator[ModuleCall]) -> None:
        """Go to the first call."""
        self._enter(COMPUTE)
        self._calls, self._next = calls, next(calls, None)
        self.builder.join(EXCHANGES, COMPUTE)
        self._event = self.builder.record(COMPUTE)

    def run(self, place: Place | None, stream: str = COMPUTE) -> None:
        """Issue all calls up to the end of a node, or (None) all that stand around the layers here."""
        if self._next is None or not self._is_at(place):
            return
        self._enter(stream)
        if stream != self._stream:
            self.builder.stream_wait(stream, self._event)
        self.walk.stream, self.walk.ready = stream, None if stream == COMPUTE else self._event
        self._stream = stream
        while self._next is not None and self._is_at(place):
            self._next = next(self._calls, None)
        self.walk.stream, self.walk.ready = COMPUTE, None
        self._event = self.builder.record(stream)

    def layer(self, node: Node, name: str | None) -> None:
        """Issue one node of a layer, on its stream."""
        if name is not None:
            self.run((name, node), EXCHANGES if node in ("dispatch", "combination") else COMPUTE)

    def backward_of(self, call: ModuleCall) -> None:
        """Issue a module's backward. The gradients of a layer's weights are left for `issue_weights`."""
        if not self._is_delayed or not self.nodes[call.segment]:
            self.walk.backward_module(call)
            return
        self.walk.backward_input(call)
        self._left.append(call)

    def weights(self) -> None:
        """Issue the gradients of weights that were left."""
        if self._left:
            self._enter(COMPUTE)
        for call in self._left:
            self.walk.backward_weight(call)
        self._left = []

    def end(self) -> None:
        """The compute stream goes on behind all that was issued."""
        self.builder.stream_wait(COMPUTE, self._event)

    def _is_at(self, place: Place | None) -> bool:
        assert self._next is not None
        nodes = self.nodes[self._next.segment]
        if place is None:
            return not nodes
        return bool(nodes) and (self._next.segment, nodes[self._next.name]) == place

    def _enter(self, stream: str) -> None:
        builder = self.builder
        builder.phase, builder.micro_batch = self.phase, self.walk.micro_batch
        if not builder.actions or builder.actions[-1][1] != self.action:
            builder.begin(self.action)


def run_pair(
    builder: PlanBuilder,
    pair: Overlap,
    walks: tuple[Walk, Walk],
    *,
    is_last: bool,
    is_told: bool,
    is_delayed: bool,
) -> None:
    """Issue a forward and a backward side by side: [Note: one layer of each].

    `walks` are the forward's and the backward's. With `is_delayed` the gradients of weights are issued
    separately (`--delay-wgrad-compute`). `is_last` and `schedule_manages_sharding` are those of
    `Hooks.begin_backward`.
    """
    forward = PairedPass(builder, walks[0], pair.forward, is_delayed=False)
    backward = PairedPass(builder, walks[1], pair.backward, is_delayed=is_delayed)
    forward.begin(walks[0].forward_calls())
    forward.run(None)
    backward.begin(walks[1].backward_calls(backward.backward_of, is_last=is_last, is_told=is_told))
    backward.run(None)
    for ahead, behind in zip_longest(forward.layers, backward.layers):
        backward.layer("combination", behind)
        forward.layer("first", ahead)
        backward.layer("experts", behind)
        forward.layer("dispatch", ahead)
        backward.weights()
        backward.layer("dispatch", behind)
        forward.layer("experts", ahead)
        forward.layer("combination", ahead)
        backward.layer("first", behind)
        backward.weights()
    for side in (forward, backward):
        side.end()
        side.run(None)
    for side in (forward, backward):
        side.end()
