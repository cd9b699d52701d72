"""torch's pipelines: the counts that `torch/distributed/pipelining/schedules.py` of torch 2.13 takes, and the
steps and messages of their runtime.

With one stage per rank each schedule issues its own steps. With several, `_PipelineScheduleRuntime` lowers an
order of computations in passes.

# [Note: buffers for all micro-batches]
A stage allocates buffers for the inputs and for the gradients of its outputs of all micro-batches once, and
keeps them (`_setup_forward_recv_info`, `_create_grad_recv_info` of torch 2.13
distributed/pipelining/stage.py). A stage on the same rank as its neighbour has the neighbour's tensors
instead. A forward works on its buffer, so that what its first module keeps of the input is the buffer.
Between forward and backward it is counted as the module's. A backward adds to the gradient it received out of
place, for the buffer is still referred to. What a stage sends back is freed once it is sent. Its output stays
for its backward (`fwd_cache`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from zsim.cost.kernels.shapes import WorkOptions
from zsim.cost.memory import saves_only_block_input
from zsim.errors import InputError
from zsim.plan.actions import Action, Kind, MessageCall, MessageWait, Order, Overlap, Step, actions_of
from zsim.plan.builder import PlanBuilder
from zsim.plan.pipeline.lowering import check_micro_batches, orders_of, read_csv
from zsim.plan.pipeline.messages import Messenger, output_of
from zsim.plan.pipeline.orders import chunk_group_size, ranks_of_stages
from zsim.plan.pipeline.run_actions import PipelineRuntime
from zsim.plan.stage import Stage
from zsim.plan.walk import RESIDUAL


@dataclass(frozen=True, slots=True)
class TorchRuntime(PipelineRuntime):
    """`torch.distributed.pipelining`."""

    is_fsdp: bool = False
    """Stages are wrapped by FSDP, which is told when to gather, free and reduce."""

    def check(self, micro_batches: int) -> None:
        schedule, ranks = self.parallelism.schedule, self.parallelism.pipeline
        if schedule == "1f1b":
            expected = f"at least one per pipeline rank, {ranks}"
            check_micro_batches(self.parallelism, micro_batches, expected, lambda number: number >= ranks)
        elif schedule in ("interleaved-1f1b", "interleaved-zero-bubble"):
            expected = f"a multiple of its rounds, micro-batches // {ranks} pipeline ranks"
            check_micro_batches(
                self.parallelism, micro_batches, expected,
                lambda number: number % max(1, number // ranks) == 0,
            )  # fmt: skip
        elif schedule == "dualpipe-v":
            expected = f"at least one per stage, {2 * ranks}"
            check_micro_batches(self.parallelism, micro_batches, expected, lambda number: number >= 2 * ranks)

    def steps(self, micro_batches: int) -> list[list[Step]]:
        schedule, ranks = self.parallelism.schedule, self.parallelism.pipeline
        if self.parallelism.schedule_text:
            return self._steps_of_file(micro_batches)
        if schedule == "gpipe":
            return gpipe_steps(ranks, micro_batches, is_fsdp=self.is_fsdp)
        if schedule == "1f1b":
            return one_forward_one_backward_steps(ranks, micro_batches, is_fsdp=self.is_fsdp)
        virtual, group_size = self.parallelism.virtual_stages, chunk_group_size(ranks, micro_batches)
        orders = orders_of(schedule, ranks, virtual, micro_batches, group_size)
        return self._lower(orders, ranks_of_stages(schedule, ranks, virtual), micro_batches)

    def _steps_of_file(self, micro_batches: int) -> list[list[Step]]:
        parallelism = self.parallelism
        counts = parallelism.pipeline, parallelism.virtual_stages, micro_batches
        schedule = read_csv(parallelism.schedule_text, *counts)
        if schedule.is_lowered:
            return steps_of_orders(schedule.orders, is_fsdp=self.is_fsdp)
        return self._lower(schedule.orders, schedule.rank_of, micro_batches)

    def _lower(self, orders: Sequence[Order], rank_of: Sequence[int], micro_batches: int) -> list[list[Step]]:
        lowered = lower_orders(orders, rank_of, micro_batches)
        return steps_of_orders(lowered, is_fsdp=self.is_fsdp)

    def messenger(
        self, builder: PlanBuilder, stages: Mapping[int, Stage], ranks: Sequence[int], rank: int
    ) -> TorchMessenger:
        return TorchMessenger(builder, stages, ranks, rank)


_KINDS: tuple[Kind, Kind] = ("F", "B")


def gpipe_steps(ranks: int, micro_batches: int, *, is_fsdp: bool) -> list[list[Step]]:
    """`ScheduleGPipe._step_microbatches`: every message has its own call, a receive is waited for before its
    computation, sends of a phase at the phase's end.
    """
    programs = []
    for rank in range(ranks):
        steps: list[Step] = []
        for kind in _KINDS:
            sends: list[Action] = []
            for number in range(micro_batches):
                _post(steps, _receive(kind, rank, ranks, number), "stream")
                steps.append(Action(kind, rank, number))
                new_sends = _send(kind, rank, ranks, number)
                _post(steps, new_sends, "use")
                sends += new_sends
            if sends:
                steps.append(MessageWait(tuple(sends)))
        programs.append(_reduce_last(steps, rank, is_fsdp=is_fsdp))
    return programs


def one_forward_one_backward_steps(ranks: int, micro_batches: int, *, is_fsdp: bool) -> list[list[Step]]:
    """`Schedule1F1B._step_microbatches`: between the first and the last backward that follow a forward, a
    send goes in one batch with the receive from the same neighbour. Before and after, each message has its
    own call, and a send is waited for after the next computation.
    """
    return [
        _reduce_last(_one_forward_one_backward(ranks, rank, micro_batches), rank, is_fsdp=is_fsdp)
        for rank in range(ranks)
    ]


def _one_forward_one_backward(ranks: int, rank: int, micro_batches: int) -> list[Step]:
    steps: list[Step] = []
    num_warmup = min(micro_batches, ranks - rank)
    waiting: list[Action] = []
    for number in range(num_warmup):
        _post(steps, _receive("F", rank, ranks, number), "stream")
        steps.append(Action("F", rank, number))
        waiting = _wait(steps, waiting)
        if number < num_warmup - 1:
            waiting = _send("F", rank, ranks, number)
            _post(steps, waiting, "use")
    for number in range(micro_batches):
        forward = number + num_warmup - 1  # whose output is still unsent
        is_steady = forward < micro_batches
        new_sends = _send("F", rank, ranks, forward) if is_steady else []
        _post(steps, new_sends + _receive("B", rank, ranks, number), "stream")
        steps.append(Action("B", rank, number))
        new_sends = _send("B", rank, ranks, number)
        if forward + 1 < micro_batches:
            _post(steps, new_sends + _receive("F", rank, ranks, forward + 1), "stream")
            steps.append(Action("F", rank, forward + 1))
        else:
            _wait(steps, waiting)
            _post(steps, new_sends, "use")
            waiting = new_sends
    _wait(steps, waiting)
    return steps


def _wait(steps: list[Step], messages: list[Action]) -> list[Action]:
    if messages:
        steps.append(MessageWait(tuple(messages)))
    return []


def _post(steps: list[Step], messages: list[Action], waits: str) -> None:
    """`_batch_p2p`: sends and receives are one batch if there are both. Otherwise they are lone messages."""
    if messages:
        is_batched = len({message.kind.startswith("SEND") for message in messages}) == 2
        steps.append(MessageCall(tuple(messages), is_batched, "stream" if waits == "stream" else "use"))


def _receive(kind: str, rank: int, ranks: int, number: int) -> list[Action]:
    if kind == "F":
        return [Action("RECV_F", rank, number)] if rank > 0 else []
    return [Action("RECV_B", rank, number)] if rank < ranks - 1 else []


def _send(kind: str, rank: int, ranks: int, number: int) -> list[Action]:
    if kind == "F":
        return [Action("SEND_F", rank, number)] if rank < ranks - 1 else []
    return [Action("SEND_B", rank, number)] if rank > 0 else []


def _reduce_last(steps: list[Step], stage: int, *, is_fsdp: bool) -> list[Step]:
    """The steps, with FSDP's gradients reduced last (`perform_reduce_grad`, which does nothing without)."""
    return [*steps, Action("REDUCE_GRAD", stage)] if is_fsdp else steps


MAX_ACTIVE_STAGES = 3  # `max_active_stages` of `_add_unshard_reshard`, which no caller sets
_BACKWARDS: tuple[Kind, ...] = ("B", "I")
_FSDP: tuple[Kind, ...] = ("UNSHARD", "RESHARD", "REDUCE_GRAD")


def lower_orders(orders: Sequence[Order], rank_of: Sequence[int], micro_batches: int) -> list[Order]:
    """The orders with parameters gathered and freed, gradients reduced, and messages. `rank_of` has the
    pipeline rank of every stage. Torch lowers so whether its stages are FSDP's or not.

    Raises InputError if a computation never gets its input.
    """
    prepared = [_add_reductions(_add_unshards(order), micro_batches) for order in orders]
    return _add_messages(prepared, rank_of)


def steps_of_orders(orders: Iterable[Order], *, is_fsdp: bool) -> list[list[Step]]:
    """Programs of lowered orders: every message goes alone, a computation waits for what it received, sends
    are waited at the step's end. Without FSDP its three actions do nothing and are left out."""
    return [
        [_step(action) for action in _actions(order) if is_fsdp or action.kind not in _FSDP]
        for order in orders
    ]


def _step(action: Action) -> Step:
    if action.kind.startswith(("SEND", "RECV")):
        return MessageCall((action,), is_batched=False, waits="use")
    return action


def _actions(order: Iterable[Action | Overlap]) -> Iterator[Action]:
    for item in order:
        yield from actions_of(item)


def _add_unshards(order: Order) -> Order:
    """Before each item, stages that are not next any more are freed, and then the next stages that are not
    gathered are gathered. The next stages are the first MAX_ACTIVE_STAGES from the item on, with an overlap's
    second stage even beyond (`_add_unshard_reshard`). Stages are freed in the order in which they were
    gathered. torch's order is that of a set.
    """
    active: dict[int, None] = {}
    lowered_order: Order = []
    for item, next_stages in zip(order, _next_stages(order), strict=True):
        for stage in [stage for stage in active if stage not in next_stages]:
            del active[stage]
            lowered_order.append(Action("RESHARD", stage))
        for stage in [stage for stage in next_stages if stage not in active]:
            active[stage] = None
            lowered_order.append(Action("UNSHARD", stage))
        lowered_order.append(item)
    return [*lowered_order, *(Action("RESHARD", stage) for stage in active)]


def _next_stages(order: Order) -> list[list[int]]:
    """The stages that come next from every item on, computed from the last item to the first."""
    firsts: dict[int, int] = {}  # the item at which each stage comes next, in the order of coming
    next_stages = []
    for position in reversed(range(len(order))):
        item_stages = dict.fromkeys((part.stage for part in actions_of(order[position])), position)
        firsts = item_stages | {stage: first for stage, first in firsts.items() if stage not in item_stages}
        last = list(firsts.values())[:MAX_ACTIVE_STAGES][-1]
        next_stages.append([stage for stage, first in firsts.items() if first <= last])
    return next_stages[::-1]


def _add_reductions(order: Order, micro_batches: int) -> Order:
    """After a stage's last backward its gradients are reduced (`_add_reduce_grad`)."""
    backwards_per_stage: Counter[int] = Counter()
    lowered_order: Order = []
    for item in order:
        lowered_order.append(item)
        for part in actions_of(item):
            if part.kind in ("B", "W"):
                backwards_per_stage[part.stage] += 1
                if backwards_per_stage[part.stage] == micro_batches:
                    lowered_order.append(Action("REDUCE_GRAD", part.stage))
    return lowered_order


def _add_messages(orders: Sequence[Order], rank_of: Sequence[int]) -> list[Order]:
    """`_add_send_recv`: the ranks take turns, and each places its next item if that has its input. After a
    computation comes the send of its result, and the receive goes to the end of what the neighbour has placed
    by then, so that the messages of a pair have one order on both sides.
    """
    lowered_orders: list[Order] = [[] for _ in orders]
    available: list[set[Action]] = [set() for _ in orders]
    remaining_items = [iter(order) for order in orders]
    heads: list[Action | Overlap | None] = [next(remaining, None) for remaining in remaining_items]
    while any(head is not None for head in heads):
        is_stuck = True
        for rank, head in enumerate(heads):
            if head is None or not all(
                _is_ready(part, available[rank], rank_of) for part in actions_of(head)
            ):
                continue
            is_stuck = False
            lowered_orders[rank].append(head)
            for part in actions_of(head):
                available[rank].add(part)
                for action, action_rank in _messages(part, rank_of):
                    lowered_orders[action_rank].append(action)
                    available[action_rank].add(action)
            heads[rank] = next(remaining_items[rank], None)
        if is_stuck:
            waiting = ", ".join(
                f"{head} on rank {rank}" for rank, head in enumerate(heads) if head is not None
            )
            raise InputError(
                "parallelism.schedule_csv: the schedule cannot run to its end; these wait for inputs that "
                f"come after them: {waiting}"
            )
    return lowered_orders


def _is_ready(action: Action, available: set[Action], rank_of: Sequence[int]) -> bool:
    """Whether the rank has received the action's input, or has computed it itself."""
    _, stage, number = action
    if action.kind == "F" and stage > 0:
        return bool(available & {Action("RECV_F", stage, number), Action("F", stage - 1, number)})
    if action.kind in _BACKWARDS and stage < len(rank_of) - 1:
        local_results = {Action(kind, stage + 1, number) for kind in _BACKWARDS}
        return bool(available & {Action("RECV_B", stage, number), *local_results})
    return True


def _messages(action: Action, rank_of: Sequence[int]) -> list[tuple[Action, int]]:
    """The send of an action's result and its receive, each with its rank. A stage of the same rank
    gets none.
    """
    _, stage, number = action
    if action.kind not in ("F", *_BACKWARDS):
        return []
    is_forward = action.kind == "F"
    peer = stage + 1 if is_forward else stage - 1
    if not 0 <= peer < len(rank_of) or rank_of[peer] == rank_of[stage]:
        return []
    send = Action("SEND_F" if is_forward else "SEND_B", stage, number)
    receive = Action("RECV_F" if is_forward else "RECV_B", peer, number)
    return [(send, rank_of[stage]), (receive, rank_of[peer])]


INPUT_BUFFERS, GRADIENT_BUFFERS = "buffers for inputs of stage", "buffers for gradients of stage"


class TorchMessenger(Messenger):
    """Posts the messages of a rank of torch's pipelines: see [Note: buffers for all micro-batches]."""

    def __init__(
        self, builder: PlanBuilder, stages: Mapping[int, Stage], ranks: Sequence[int], rank: int
    ) -> None:
        super().__init__(builder, stages, ranks, rank, empties_outputs=False)
        any_stage = next(iter(stages.values()))
        micro_batches = any_stage.training.gradient_accumulation_steps // any_stage.parallelism.passes
        self._slots = max(micro_batches, any_stage.parallelism.buffered_micro_batches)
        self._reads_buffer = {number for number, stage in stages.items() if _keeps_input(stage)}

    def begin_step(self) -> None:
        """The buffers that the step before has left."""
        self._allocate_buffers(1)

    def end_step(self) -> None:
        self._allocate_buffers(-1)

    def _allocate_buffers(self, sign: int) -> None:
        for number, stage in self.stages.items():
            for slot in range(self._slots):
                if not stage.is_first:
                    self._allocate(sign, f"{INPUT_BUFFERS} {number}", number, slot)
                if not stage.is_last:
                    self._allocate(sign, f"{GRADIENT_BUFFERS} {number}", number, slot)

    # -- around the computation ---------------------------------------------------------------------------

    def pre_forward(self, stage: int, micro_batch: int) -> None:
        """Wait for the input, whose buffer the stage's first module takes over."""
        self._wait(Action("RECV_F", stage, micro_batch))
        self._take_buffer(-1, stage, micro_batch)

    def pre_backward(self, stage: int, micro_batch: int) -> None:
        """Wait for the gradient of the output."""
        self._wait(Action("RECV_B", stage, micro_batch))

    def begin_gradients(self, stage: int, micro_batch: int) -> None:
        """The first sum of the output's gradient with another is a new tensor. The last stage's walk makes
        its own.
        """
        if not self.stages[stage].is_last:
            self._allocate(1, RESIDUAL, stage, micro_batch)

    def end_gradients(self, stage: int, micro_batch: int) -> None:
        """The input's gradient is there, and what the first module kept is the stage's buffer again."""
        if not self.stages[stage].is_last and not self._is_local(stage, 1):
            self._allocate(-1, output_of(stage), stage, micro_batch)
        if self.stages[stage].is_first:
            return
        if self._is_local(stage, -1):  # takes the place of the buffer of the stage before
            self._allocate(-1, RESIDUAL, stage, micro_batch)
        self._take_buffer(1, stage, micro_batch)

    def _take_buffer(self, sign: int, stage: int, micro_batch: int) -> None:
        if stage in self._reads_buffer:
            self._allocate(sign, f"{INPUT_BUFFERS} {stage}", stage, micro_batch % self._slots)

    # -- messages -----------------------------------------------------------------------------------------

    def _receive(self, message: Action) -> None:
        """Allocate nothing: the buffer is there."""

    def _post(self, call: MessageCall) -> None:
        super()._post(call)
        for message in call.messages:
            if message.kind == "SEND_B":
                size = self.stages[message.stage].message_bytes
                number = message.micro_batch or 0
                self.builder.free_when_done(
                    "activations", size, self._events[message], owner=RESIDUAL, micro_batch=number
                )

    def _free_sent(self, message: Action) -> None:
        """Free nothing: the tensor was freed, or is kept."""


def _keeps_input(stage: Stage) -> bool:
    """Whether a later stage keeps its input, and nothing made of it, until its backward."""
    segment = next((segment for segment in stage.workload.segments if segment.calls), None)
    if stage.is_first or segment is None:
        return False
    first = segment.calls[0].module
    return segment.is_checkpointed or saves_only_block_input(first, WorkOptions.of(stage.training))
