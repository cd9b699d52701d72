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

from zsim.operations.operation import Role
from zsim.plan.actions import Action, Overlap, Step
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.ops import Phase
from zsim.plan.walk import Walk
from zsim.plan.workload.workload import ModuleCall, Segment
from zsim.specs.model.spec import Exchange

EXCHANGES = "expert exchanges"
Node = Literal["first", "dispatch", "experts", "combination"]
LayerNode = tuple[str, Node]  # segment and node; the node of what stands around the layers is "first"


def nodes_of(segment: Segment) -> dict[str, Node]:
    """The node of every call of a layer, by name: see [Note: one layer of each]. The exchange of the rows'
    counts belongs to the first.
    """
    products = [n for n, call in enumerate(segment.calls) if call.module.role is Role.EXPERT_PRODUCT]
    moving = [n for n, call in enumerate(segment.calls) if _moves_rows(call)]
    dispatching = [n for n in moving if products and n < products[0]]
    combining = [n for n in moving if products and n > products[-1]]
    nodes: dict[str, Node] = {}
    for n, call in enumerate(segment.calls):
        node: Node = "first"
        if dispatching and combining and n >= dispatching[0]:
            node = "dispatch" if n <= dispatching[-1] else "experts" if n < combining[0] else "combination"
        nodes[call.name] = node
    return nodes


def _is_layer(segment: Segment) -> bool:
    """Whether it is a layer of the language model. A vision tower runs before the first, in one piece."""
    return segment.kind == "block" and not segment.calls[0].module.image_rows


def _moves_rows(call: ModuleCall) -> bool:
    work = call.module.op_spec
    return isinstance(work, Exchange) and work.forward == "all_to_all" and work.group.startswith("expert")


class PairedPass:
    """One of the two passes: its remaining calls, its current node, and the event of what it has issued."""

    def __init__(self, builder: PlanBuilder, walk: Walk, action: Action, *, is_delayed: bool) -> None:
        self.builder, self.walk, self.action = builder, walk, action
        self.phase: Phase = "forward" if action.kind == "F" else "backward"
        self.nodes: dict[str, Mapping[str, Node]] = {
            segment.name: nodes_of(segment) if _is_layer(segment) else {}
            for segment in walk.workload.segments
        }
        self.layers = [segment.name for segment in walk.workload.segments if _is_layer(segment)]
        if self.phase == "backward":
            self.layers.reverse()
        self._is_delayed = is_delayed
        self._delayed_weights: list[ModuleCall] = []
        self._event: int | None = None
        self._stream = COMPUTE
        self._calls: Iterator[ModuleCall] = iter(())
        self._next_call: ModuleCall | None = None

    def begin(self, calls: Iterator[ModuleCall]) -> None:
        """Go to the first call."""
        self._enter_phase(COMPUTE)
        self._calls, self._next_call = calls, next(calls, None)
        self.builder.join(EXCHANGES, COMPUTE)
        self._event = self.builder.record(COMPUTE)

    def run(self, layer_node: LayerNode | None, stream: str = COMPUTE) -> None:
        """Issue all calls up to the end of a node, or (None) all that stand around the layers here."""
        if self._next_call is None or not self._is_next_in(layer_node):
            return
        self._enter_phase(stream)
        if stream != self._stream:
            self.builder.stream_wait(stream, self._event)
        self.walk.stream, self.walk.input_event = stream, None if stream == COMPUTE else self._event
        self._stream = stream
        while self._next_call is not None and self._is_next_in(layer_node):
            self._next_call = next(self._calls, None)
        self.walk.stream, self.walk.input_event = COMPUTE, None
        self._event = self.builder.record(stream)

    def issue_layer(self, node: Node, name: str | None) -> None:
        """Issue one node of a layer, on its stream."""
        if name is not None:
            self.run((name, node), EXCHANGES if node in ("dispatch", "combination") else COMPUTE)

    def issue_backward(self, call: ModuleCall) -> None:
        """Issue a module's backward. The gradients of a layer's weights are left for `issue_weights`."""
        if not self._is_delayed or not self.nodes[call.segment]:
            self.walk.backward_module(call)
            return
        self.walk.backward_input(call)
        self._delayed_weights.append(call)

    def issue_weights(self) -> None:
        """Issue the gradients of weights that were left."""
        if self._delayed_weights:
            self._enter_phase(COMPUTE)
        for call in self._delayed_weights:
            self.walk.backward_weight(call)
        self._delayed_weights = []

    def end(self) -> None:
        """The compute stream goes on behind all that was issued."""
        self.builder.stream_wait(COMPUTE, self._event)

    def _is_next_in(self, layer_node: LayerNode | None) -> bool:
        assert self._next_call is not None
        nodes = self.nodes[self._next_call.segment]
        if layer_node is None:
            return not nodes
        return bool(nodes) and (self._next_call.segment, nodes[self._next_call.name]) == layer_node

    def _enter_phase(self, stream: str) -> None:
        builder = self.builder
        builder.phase, builder.micro_batch = self.phase, self.walk.micro_batch
        if not builder.actions or builder.actions[-1][1] != self.action:
            builder.begin(self.action)


def paired_without_pipeline(micro_batches: int) -> list[Step]:
    """The first forward, then every backward at the same time as the next forward, then the last backward
    (`combined_1f1b_schedule_for_no_pipelining`, Megatron-LM d98e8a64
    megatron/core/pipeline_parallel/combined_1f1b.py).
    """
    pairs = [
        Overlap(Action("F", 0, number + 1), Action("B", 0, number)) for number in range(micro_batches - 1)
    ]
    return [Action("F", 0, 0), *pairs, Action("B", 0, micro_batches - 1)]


def run_pair(
    builder: PlanBuilder,
    pair: Overlap,
    walks: tuple[Walk, Walk],
    *,
    is_last: bool,
    schedule_manages_sharding: bool,
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
    backward.begin(
        walks[1].backward_calls(
            backward.issue_backward, is_last=is_last, schedule_manages_sharding=schedule_manages_sharding
        )
    )
    backward.run(None)
    for forward_layer, backward_layer in zip_longest(forward.layers, backward.layers):
        backward.issue_layer("combination", backward_layer)
        forward.issue_layer("first", forward_layer)
        backward.issue_layer("experts", backward_layer)
        forward.issue_layer("dispatch", forward_layer)
        backward.issue_weights()
        backward.issue_layer("dispatch", backward_layer)
        forward.issue_layer("experts", forward_layer)
        forward.issue_layer("combination", forward_layer)
        backward.issue_layer("first", backward_layer)
        backward.issue_weights()
    for paired_pass in (forward, backward):
        paired_pass.end()
        paired_pass.run(None)
    for paired_pass in (forward, backward):
        paired_pass.end()
