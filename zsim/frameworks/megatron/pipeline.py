"""Steps of Megatron-Core's 1F1B, interleaved and without interleaving.

Source: `forward_backward_pipelining_with_interleaving` of Megatron-Core 0.16.1
`core/pipeline_parallel/schedules.py`, `_p2p_ops` and `_batched_p2p_ops` of
`core/pipeline_parallel/p2p_communication.py`. The send is waited for at once from core 0.18 on (commit
260cba71).

Without interleaving: `forward_backward_pipelining_without_interleaving` and `P2PCommunicator` of
`core/pipeline_parallel/p2p_communication.py`.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

from zsim.frameworks.megatron.settings.config import MegatronConfig
from zsim.plan.actions import Action, MessageCall, MessageWait, Overlap, Step
from zsim.plan.pipeline.orders import interleaved_lists, interleaved_table, num_interleaved_warmup

_BATCH_ORDER = ("SEND_B", "RECV_F", "SEND_F", "RECV_B")  # the previous rank's first, a send before a receive


def interleaved_steps(
    ranks: int, virtual: int, micro_batches: int, settings: MegatronConfig
) -> list[list[Step]]:
    """The steps of each rank.

    With overlap, every message is a call of its own: after each computation its result is sent and the next
    input posted. In the warm-up and the cool-down the compute stream waits for both at once, and in the
    steady turns for a receive in front of its use. Without overlap there is one batch after each turn, and
    the host waits.
    """
    programs = []
    for rank in range(ranks):
        program = _Interleaved(_Turns(ranks, rank, virtual, micro_batches, settings), settings)
        program.run()
        programs.append(program.steps)
    return programs


class _Turns:
    """The virtual micro-batches of a rank and the messages that belong to each. `num_warmup` forwards come
    before the first backward, one more where forwards and backwards are pairs.
    """

    def __init__(
        self, ranks: int, rank: int, virtual: int, micro_batches: int, settings: MegatronConfig
    ) -> None:
        group_size = settings.micro_batch_group or ranks
        self.ranks, self.rank, self.virtual = ranks, rank, virtual
        self.is_first, self.is_last = rank == 0, rank == ranks - 1
        self.table = interleaved_table(micro_batches, virtual, group_size)
        self.num_turns = len(self.table)
        self.last_micro_batch = micro_batches - 1
        num_warmup = num_interleaved_warmup(ranks, rank, virtual, micro_batches, group_size)
        self.num_warmup = min(self.num_turns, num_warmup + settings.overlap_expert_parallel)
        self.forwards, self.backwards = interleaved_lists(ranks, rank, virtual, micro_batches, group_size)

    def stage(self, chunk: int) -> int:
        """The stage that is the rank's `chunk`-th."""
        return chunk * self.ranks + self.rank

    def forward_send(self, turn: int) -> list[Action]:
        """The send of a forward's output. The last stage has none."""
        forward = self.forwards[turn]
        return [] if forward.stage == self.ranks * self.virtual - 1 else [forward._replace(kind="SEND_F")]

    def backward_send(self, turn: int) -> list[Action]:
        """The send of a backward's gradient. The first stage has none."""
        backward = self.backwards[turn]
        return [] if backward.stage == 0 else [backward._replace(kind="SEND_B")]

    def forward_receive(self, turn: int) -> list[Action]:
        """The input that is received after forward `turn`. It is that of the next forward, but the first rank
        receives the result that the last rank, ranks - 1 turns later, has computed in its turn.
        """
        if not self.is_first:
            return [] if turn + 1 == self.num_turns else [self.forwards[turn + 1]._replace(kind="RECV_F")]
        source = turn - (self.ranks - 1)
        if source < 0 or self.table[source][1] == self.virtual - 1 or turn + 1 == self.num_turns:
            return []
        number, chunk = self.table[source]
        return [Action("RECV_F", self.stage(chunk + 1), number)]

    def backward_receive(self, turn: int) -> list[Action]:
        """The gradient that is received after backward `turn`. The last rank's comes from the first rank."""
        if not self.is_last:
            return [] if turn + 1 == self.num_turns else [self.backwards[turn + 1]._replace(kind="RECV_B")]
        source = turn - (self.ranks - 1)
        if source < 0 or self.table[source][1] == self.virtual - 1 or turn + 1 == self.num_turns:
            return []
        number, chunk = self.table[source]
        return [Action("RECV_B", self.stage(self.virtual - 1 - chunk - 1), number)]

    def gathers_before(self, turn: int) -> list[Action]:
        """The chunk whose parameters start to be gathered in front of forward `turn`: the one after the chunk
        whose first micro-batch the last rank begins in the pipeline's same slot.
        """
        turn += self.rank
        if turn >= self.num_turns or self.table[turn][0] != 0:
            return []
        chunk = self.table[turn][1] + 1
        return [Action("UNSHARD", self.stage(chunk))] if 1 < chunk < self.virtual else []

    def reductions_after(self, turn: int) -> list[Action]:
        """The chunk whose gradients start to be reduced after backward `turn`: the one whose last micro-batch
        was `rank` turns before, so that all ranks reduce the same chunk at about one time.
        """
        turn -= self.rank
        if turn < 0 or self.table[turn][0] != self.last_micro_batch:
            return []
        return [Action("REDUCE_GRAD", self.stage(self.virtual - 1 - self.table[turn][1]))]


class _Interleaved:
    """The program of one rank being written. `_inputs` and `_gradients` are pending receives, in the order in
    which Megatron keeps and waits for them. This is not always that of their use: with a group above the
    pipeline ranks a forward can wait for a later one's input.
    """

    def __init__(self, turns: _Turns, settings: MegatronConfig) -> None:
        self.turns, self.settings = turns, settings
        self.steps: list[Step] = []
        self._inputs: deque[Action] = deque()
        self._gradients: deque[Action] = deque()
        self._pending: dict[str, Action] = {}  # the last send of each kind, unwaited
        self._reduced: set[int] = set()

    def run(self) -> None:
        """Writes the whole program."""
        turns, settings = self.turns, self.settings
        if settings.aligns_param_gather:
            self.steps += [Action("UNSHARD", turns.stage(chunk)) for chunk in (0, 1)]
        if not turns.is_first:
            self._post_and_wait([turns.forwards[0]._replace(kind="RECV_F")])
        for turn in range(turns.num_warmup):
            self._warmup_forward(turn)
        self._begin_steady_turns()
        for turn in range(turns.num_turns - turns.num_warmup):
            if settings.overlap_p2p:
                self._overlapped_steady_turn(turn)
            else:
                self._steady_turn(turn)
        for turn in range(turns.num_turns - turns.num_warmup, turns.num_turns):
            self._cooldown_backward(turn)
        self._wait_for_send("SEND_B")
        if settings.aligns_grad_reduce:
            stages = [turns.stage(chunk) for chunk in range(turns.virtual)]
            self.steps += [Action("REDUCE_GRAD", stage) for stage in stages if stage not in self._reduced]

    # ---- parts of the program ----------------------------------------------------------------------------

    def _warmup_forward(self, turn: int) -> None:
        turns = self.turns
        sends, receives = turns.forward_send(turn), turns.forward_receive(turn)
        if self.settings.overlap_p2p_warmup_flush:
            early_receives = [] if turns.is_first else receives
            self._wait_for_receive(self._inputs, turns.forwards[turn], is_posting=bool(early_receives))
            self._post(early_receives, "use")
            self._forward(turn)
            self._post(sends if early_receives else sends + receives, "use")
            self._keep_send("SEND_F", sends, is_waited=self.settings.waits_sends)
            self._inputs += receives
            return
        self._forward(turn)
        is_joined = turn == turns.num_warmup - 1 < turns.num_turns - 1 and not self.settings.overlap_p2p
        gradient = self._first_gradient() if is_joined else []
        self._post_and_wait(sends + receives + gradient)

    def _first_gradient(self) -> list[Action]:
        return [] if self.turns.is_last else [self.turns.backwards[0]._replace(kind="RECV_B")]

    def _begin_steady_turns(self) -> None:
        """The gradient of the first backward is posted after the last warm-up forward, and without overlap in
        one batch with it. If all forwards are ahead, it is received at once.
        """
        if self.turns.num_warmup == self.turns.num_turns:
            if not self.turns.is_last:
                self._post_and_wait(self._first_gradient())
        elif self.settings.overlap_p2p:
            self._post(self._first_gradient(), "use")
            self._gradients += self._first_gradient()

    def _steady_turn(self, turn: int) -> None:
        """A forward and a backward, then all messages in one batch."""
        turns, forward_turn = self.turns, turn + self.turns.num_warmup
        self._forward_and_backward(forward_turn, turn)
        self._post_and_wait(
            turns.forward_send(forward_turn)
            + turns.backward_send(turn)
            + turns.forward_receive(forward_turn)
            + turns.backward_receive(turn)
        )

    def _overlapped_steady_turn(self, turn: int) -> None:
        turns, forward_turn = self.turns, turn + self.turns.num_warmup
        self._wait_for_receive(self._inputs, turns.forwards[forward_turn])
        if self.settings.overlap_expert_parallel:
            self._wait_for_receive(self._gradients, turns.backwards[turn])
            self._forward_and_backward(forward_turn, turn)
        else:
            self._forward(forward_turn)
        sends, receives = turns.forward_send(forward_turn), turns.forward_receive(forward_turn)
        self._post(sends + receives, "use")
        self._keep_send("SEND_F", sends, is_waited=self.settings.waits_sends)
        self._inputs += receives
        if not self.settings.overlap_expert_parallel:
            self._wait_for_receive(self._gradients, turns.backwards[turn])
            self._backward(turn)
        self._post_backward(turns.backward_send(turn), turns.backward_receive(turn))

    def _cooldown_backward(self, turn: int) -> None:
        turns = self.turns
        sends, receives = turns.backward_send(turn), turns.backward_receive(turn)
        early_receives = receives if self.settings.overlap_p2p_warmup_flush and not turns.is_last else []
        if turn > 0:
            self._wait_for_receive(self._gradients, turns.backwards[turn], is_posting=bool(early_receives))
        self._post(early_receives, "use")
        self._gradients += early_receives
        receives = [] if early_receives else receives
        self._backward(turn)
        if self.settings.overlap_p2p_warmup_flush:
            self._post_backward(sends, receives)
        else:
            self._post_and_wait(sends + receives)

    def _forward(self, turn: int) -> None:
        if self.settings.aligns_param_gather:
            self.steps += self.turns.gathers_before(turn)
        self.steps.append(self.turns.forwards[turn])

    def _forward_and_backward(self, forward_turn: int, turn: int) -> None:
        """A forward and a backward, as a pair where they are."""
        if not self.settings.overlap_expert_parallel:
            self._forward(forward_turn)
            self._backward(turn)
            return
        if self.settings.aligns_param_gather:
            self.steps += self.turns.gathers_before(forward_turn)
        self.steps.append(Overlap(self.turns.forwards[forward_turn], self.turns.backwards[turn]))
        self._reduce(turn)

    def _backward(self, turn: int) -> None:
        self.steps.append(self.turns.backwards[turn])
        self._reduce(turn)

    def _reduce(self, turn: int) -> None:
        if self.settings.aligns_grad_reduce:
            reductions = self.turns.reductions_after(turn)
            self.steps += reductions
            self._reduced |= {reduction.stage for reduction in reductions}

    # ---- messages ----------------------------------------------------------------------------------------

    def _post_and_wait(self, messages: list[Action]) -> None:
        """Post messages that are waited for at once: a batch and its host wait, even of nothing, or lone
        messages.
        """
        if self.settings.overlap_p2p:
            self._post(messages, "stream")
        else:
            ordered = sorted(messages, key=lambda message: _BATCH_ORDER.index(message.kind))
            self.steps.append(MessageCall(tuple(ordered), is_batched=True, waits="host"))

    def _post(self, messages: list[Action], waits: Literal["stream", "use"]) -> None:
        """Post lone messages. Even ranks post sends first, odd ranks receives. Between two ranks only, those
        of even ranks and those of odd ones have communicators of their own.
        """
        if not messages:
            return
        is_even = self.turns.rank % 2 == 0
        ordered = sorted(messages, key=lambda message: message.kind.startswith("SEND") != is_even)
        has_communicator_per_direction = self.turns.ranks == 2
        self.steps.append(
            MessageCall(
                tuple(ordered),
                is_batched=False,
                waits=waits,
                has_communicator_per_direction=has_communicator_per_direction,
            )
        )

    def _post_backward(self, sends: list[Action], receives: list[Action]) -> None:
        self._post(sends + receives, "use")
        self._keep_send("SEND_B", sends, is_waited=False)
        self._gradients += receives

    def _keep_send(self, kind: str, sends: list[Action], *, is_waited: bool) -> None:
        """Wait for the send before, and for this one if `is_waited`. Otherwise keep it for the next."""
        self._wait_for_send(kind)
        if sends:
            self._pending[kind] = sends[0]
        if is_waited:
            self._wait_for_send(kind)

    def _wait_for_send(self, kind: str) -> None:
        if kind in self._pending:
            self.steps.append(MessageWait((self._pending.pop(kind),)))

    def _wait_for_receive(self, posted: deque[Action], action: Action, *, is_posting: bool = False) -> None:
        """Wait for the oldest pending receive, which is what Megatron does in front of each computation that
        has an input from elsewhere. If it is the computation's own, that waits by itself, unless another
        receive `is_posting` in between, which then begins after the wait.
        """
        is_edge = action.stage == (0 if action.kind == "F" else self.turns.ranks * self.turns.virtual - 1)
        if not posted or is_edge:
            return
        oldest = posted.popleft()
        if is_posting or (oldest.stage, oldest.micro_batch) != (action.stage, action.micro_batch):
            self.steps.append(MessageWait((oldest,)))


def one_forward_one_backward_steps(
    ranks: int, micro_batches: int, settings: MegatronConfig
) -> list[list[Step]]:
    """The steps of each rank. Each call is one batch, after which the host waits (`batch_p2p_sync`). A send
    goes with the receive from the same neighbour between the first and the last forward that a backward
    follows at once. With `aligns_grad_reduce` all ranks but the first reduce after their last backward's
    send.
    """
    return [_steps(ranks, rank, micro_batches, settings) for rank in range(ranks)]


def _steps(ranks: int, rank: int, micro_batches: int, settings: MegatronConfig) -> list[Step]:
    num_warmup = min(ranks - 1 - rank, micro_batches)
    is_first, is_last = rank == 0, rank == ranks - 1
    steps: list[Step] = []

    def exchange(*messages: Action) -> None:
        """One batch of the messages that have a neighbour: `_batched_p2p_ops` orders them by neighbour, the
        previous rank's first, and a send before a receive."""
        sent_or_received = [
            message
            for message in messages
            if not (is_first if message.kind in ("RECV_F", "SEND_B") else is_last)
        ]
        if sent_or_received:
            steps.append(MessageCall(tuple(sent_or_received), is_batched=True, waits="host"))

    for number in range(num_warmup):
        exchange(Action("RECV_F", rank, number))
        steps.append(Action("F", rank, number))
        exchange(Action("SEND_F", rank, number))
    if num_warmup < micro_batches:
        exchange(Action("RECV_F", rank, num_warmup))
    for number in range(micro_batches):
        forward = number + num_warmup
        if forward < micro_batches:
            steps.append(Action("F", rank, forward))
            exchange(Action("SEND_F", rank, forward), Action("RECV_B", rank, number))
        else:
            exchange(Action("RECV_B", rank, number))
        steps.append(Action("B", rank, number))
        if forward + 1 < micro_batches:
            exchange(Action("SEND_B", rank, number), Action("RECV_F", rank, forward + 1))
        else:
            exchange(Action("SEND_B", rank, number))
    if settings.aligns_grad_reduce and not is_first:
        steps.append(Action("REDUCE_GRAD", rank))
    return steps
