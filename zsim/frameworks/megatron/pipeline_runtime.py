"""The pipelines of Megatron-Core: what their settings demand of the counts, their steps and their messages.

# [Note: timers that wait]
Megatron's timers wait for the device when they start and when they stop (`torch.cuda.synchronize`,
Megatron-LM d98e8a64 megatron/core/timers.py). Level 2 times every forward, every backward and every exchange
of messages (core/pipeline_parallel/schedules.py, p2p_communication.py), so that messages which would be
waited for at their use are waited for where they are posted. What level 1 times, around all micro-batches and
in the optimizer, ends where the host waits anyway. Its barriers are left out.

# [Note: one layer of each]
A forward and a backward run side by side, layer by layer, to overlap experts' exchanges. Every layer is cut
into four nodes: all up to the exchange (attention, router, permutation), the dispatch, the experts, the
combination. A dense layer is the first alone. Both micro-batches' nodes are in order by events of their own,
on the compute stream or, dispatch and combination, on a stream for exchanges. The host issues: backward's
combination, forward's first node, backward's experts, forward's dispatch, the gradients of the experts'
weights and backward's dispatch, forward's experts and combination, backward's first node and the gradients of
its weights. Layers that only one of the two has run by themselves. Embedding, loss and what belongs to
neither stands around the layers. (`TransformerLayerSchedulePlan.run`, `TransformerModelChunkSchedulePlan.run`
of Megatron-LM d98e8a64 megatron/core/models/common/model_chunk_schedule_plan.py.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal

from zsim.errors import InputError
from zsim.frameworks.megatron.pipeline import (
    interleaved_steps,
    one_forward_one_backward_steps,
)
from zsim.frameworks.megatron.settings.config import MegatronConfig
from zsim.operations.operation import Role
from zsim.plan.actions import Action, Overlap, Step
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.ops import Phase
from zsim.plan.pipeline.lowering import check_micro_batches
from zsim.plan.pipeline.messages import Messenger
from zsim.plan.pipeline.run_actions import PipelineRuntime
from zsim.plan.stage import Stage
from zsim.plan.walk import Walk
from zsim.plan.workload.workload import ModuleCall, Segment
from zsim.specs.model.spec import Exchange
from zsim.specs.strategy.parallelism import TENSOR


@dataclass(frozen=True, slots=True)
class MegatronRuntime(PipelineRuntime):
    """`core/pipeline_parallel/schedules.py` of Megatron-Core 0.16.1, with the checks of
    `training/arguments.py`.
    """

    settings: MegatronConfig = field(kw_only=True)

    @property
    def synchronizes(self) -> bool:
        """See [Note: timers that wait]."""
        return self.settings.synchronizes_timers

    def check(self, micro_batches: int) -> None:
        if self.parallelism.schedule == "interleaved-1f1b":
            self._check_interleaved(micro_batches)

    def _check_interleaved(self, micro_batches: int) -> None:
        ranks, virtual, settings = self.parallelism.pipeline, self.parallelism.virtual_stages, self.settings
        group = settings.micro_batch_group or ranks
        if virtual < 2:
            raise InputError(
                f"parallelism.virtual_stages: found {virtual} with Megatron's 'interleaved-1f1b', expected 2 "
                "or more"
            )
        if settings.overlap_p2p_warmup_flush and not settings.overlap_p2p:
            raise InputError(
                "overlap_p2p_comm_warmup_flush: found true without overlap_p2p_comm, which Megatron refuses; "
                "expected both, or neither"
            )
        if ranks == 2 and not settings.overlap_p2p:
            raise InputError(
                "parallelism.pipeline: found 2, but Megatron's interleaved schedule without overlapped p2p "
                "takes more than 2; expected 3 or more, or the overlap"
            )
        if group < ranks:
            raise InputError(
                f"parallelism.pipeline: found {ranks} with microbatch_group_size_per_vp_stage = {group}; "
                f"Megatron takes a group of at least the pipeline ranks: {ranks}"
            )

        def is_right(number: int) -> bool:
            return number >= group and (number % group == 0 or number % group >= ranks)

        expected = (
            f"at least a group of {group}, and behind whole groups none or at least {ranks}, the pipeline "
            "ranks"
        )
        check_micro_batches(self.parallelism, micro_batches, expected, is_right)

    def steps(self, micro_batches: int) -> list[list[Step]]:
        ranks, virtual = self.parallelism.pipeline, self.parallelism.virtual_stages
        if self.parallelism.schedule == "interleaved-1f1b":
            return interleaved_steps(ranks, virtual, micro_batches, self.settings)
        return one_forward_one_backward_steps(ranks, micro_batches, self.settings)

    def steps_without_pipeline(self, micro_batches: int) -> list[Step]:
        if self.settings.overlap_expert_parallel:
            return paired_without_pipeline(micro_batches)
        return PipelineRuntime.steps_without_pipeline(self, micro_batches)

    def messenger(
        self, builder: PlanBuilder, stages: Mapping[int, Stage], ranks: Sequence[int], rank: int
    ) -> Messenger:
        is_unique_per_rank = self.parallelism.tensor == 1 or self.parallelism.sequence_parallel
        if self.settings.scatters_messages and not is_unique_per_rank:
            return PartitioningMessenger(builder, stages, ranks, rank, empties_outputs=True)
        return PipelineRuntime.messenger(self, builder, stages, ranks, rank)

    def run_pair(
        self,
        builder: PlanBuilder,
        pair: Overlap,
        walks: tuple[Walk, Walk],
        *,
        is_last: bool,
        schedule_manages_sharding: bool,
    ) -> None:
        run_pair(
            builder,
            pair,
            walks,
            is_last=is_last,
            schedule_manages_sharding=schedule_manages_sharding,
            is_delayed=self.settings.delay_wgrad_compute,
        )


class PartitioningMessenger(Messenger):
    """Messages of Megatron-LM 2.1 to 3.0 without sequence parallelism. Each tensor-parallel rank sends its
    part of an activation or gradient, and the receivers gather all of it
    (`scatter_gather_tensors_in_pipeline`, Narayanan et al. 2021, arXiv 2104.04473, section 4.1;
    megatron/p2p_communication.py).
    """

    def pre_forward(self, stage: int, micro_batch: int) -> None:
        super().pre_forward(stage, micro_batch)
        if not self.stages[stage].is_first:
            self._gather("input", stage)

    def pre_backward(self, stage: int, micro_batch: int) -> None:
        super().pre_backward(stage, micro_batch)
        if not self.stages[stage].is_last:
            self._gather("gradient", stage)

    def _gather(self, label: str, stage: int) -> None:
        receiver = self.stages[stage]
        self.builder.collective(
            "all_gather", receiver.sent_bytes, receiver.message_dtype, TENSOR, stream=COMPUTE,
            name=f"all_gather {label} of stage {stage}",
        )  # fmt: skip

    def _bytes(self, message: Action) -> int:
        return super()._bytes(message) // self.stages[message.stage].parallelism.tensor


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
    return segment.kind == "block" and not segment.calls[0].module.sample_rows


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
        self._enter_phase()
        self._calls, self._next_call = calls, next(calls, None)
        self.builder.join(EXCHANGES, COMPUTE)
        self._event = self.builder.record(COMPUTE)

    def run(self, layer_node: LayerNode | None, stream: str = COMPUTE) -> None:
        """Issue all calls up to the end of a node, or (None) all that stand around the layers here."""
        if self._next_call is None or not self._is_next_in(layer_node):
            return
        self._enter_phase()
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
            self._enter_phase()
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

    def _enter_phase(self) -> None:
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
