"""Steps of Megatron-Core's interleaved 1F1B.

Source: `forward_backward_pipelining_with_interleaving` of Megatron-Core 0.16.1
`core/pipeline_parallel/schedules.py`, `_p2p_ops` and `_batched_p2p_ops` of
`core/pipeline_parallel/p2p_communication.py`. The send is waited for at once from core 0.18 on (commit
260cba71).
"""

from __future__ import annotations

from collections import deque
from typing import Literal

from zsim.plan.pipeline.megatron import MegatronPipeline
from zsim.plan.pipeline.orders import interleaved_ahead, interleaved_lists, interleaved_table
from zsim.plan.pipeline.schedules import Action, MessageCall, MessageWait, Overlap, Step

_BATCH_ORDER = ("SEND_B", "RECV_F", "SEND_F", "RECV_B")  # the previous rank's first, a send before a receive


def interleaved_steps(
    ranks: int, virtual: int, micro_batches: int, settings: MegatronPipeline
) -> list[list[Step]]:
    """The steps of each rank.

    With overlap, every message is a call of its own: after each computation its result is sent and the next
    input posted. In the warm-up and the cool-down the compute stream waits for both at once, and in the
    steady turns for a receive in front of its use. Without overlap there is one batch after each turn, and
    the host waits.
    """
    programs = []
    for rank in range(ranks):
        one = _Interleaved(
            _Turns(ranks, rank, virtual, micro_batches, settings.group_size or ranks, pairs=settings.pairs),
            settings,
        )
        one.run()
        programs.append(one.steps)
    return programs


class _Turns:
    """The virtual micro-batches of a rank and the messages that belong to each. `num_warmup` forwards come
    before the first backward, one more where forwards and backwards are `pairs`.
    """

    def __init__(
        self, ranks: int, rank: int, virtual: int, micro_batches: int, group_size: int, *, pairs: bool
    ) -> None:
        self.ranks, self.rank, self.virtual = ranks, rank, virtual
        self.is_first, self.is_last = rank == 0, rank == ranks - 1
        self.table = interleaved_table(micro_batches, virtual, group_size)
        self.total = len(self.table)
        self.last_micro_batch = micro_batches - 1
        ahead = interleaved_ahead(ranks, rank, virtual, micro_batches, group_size)
        self.ahead = min(self.total, ahead + pairs)
        self.forwards, self.backwards = interleaved_lists(ranks, rank, virtual, micro_batches, group_size)

    def stage(self, chunk: int) -> int:
        """The stage that is the rank's `chunk`-th."""
        return chunk * self.ranks + self.rank

    def sent_forward(self, turn: int) -> list[Action]:
        """The send of a forward's output. The last stage has none."""
        done = self.forwards[turn]
        return [] if done.stage == self.ranks * self.virtual - 1 else [done._replace(kind="SEND_F")]

    def sent_backward(self, turn: int) -> list[Action]:
        """The send of a backward's gradient. The first stage has none."""
        done = self.backwards[turn]
        return [] if done.stage == 0 else [done._replace(kind="SEND_B")]

    def received_forward(self, turn: int) -> list[Action]:
        """The input that is received after forward `turn`. It is that of the next forward, but the first rank
        receives the result that the last rank, ranks - 1 turns later, has computed in its turn.
        """
        if not self.is_first:
            return [] if turn + 1 == self.total else [self.forwards[turn + 1]._replace(kind="RECV_F")]
        source = turn - (self.ranks - 1)
        if source < 0 or self.table[source][1] == self.virtual - 1 or turn + 1 == self.total:
            return []
        number, chunk = self.table[source]
        return [Action("RECV_F", self.stage(chunk + 1), number)]

    def received_backward(self, turn: int) -> list[Action]:
        """The gradient that is received after backward `turn`. The last rank's comes from the first rank."""
        if not self.is_last:
            return [] if turn + 1 == self.total else [self.backwards[turn + 1]._replace(kind="RECV_B")]
        source = turn - (self.ranks - 1)
        if source < 0 or self.table[source][1] == self.virtual - 1 or turn + 1 == self.total:
            return []
        number, chunk = self.table[source]
        return [Action("RECV_B", self.stage(self.virtual - 1 - chunk - 1), number)]

    def gathered(self, turn: int) -> list[Action]:
        """The chunk whose parameters start to be gathered in front of forward `turn`: the one after the chunk
        whose first micro-batch the last rank begins in the pipeline's same slot.
        """
        turn += self.rank
        if turn >= self.total or self.table[turn][0] != 0:
            return []
        chunk = self.table[turn][1] + 1
        return [Action("UNSHARD", self.stage(chunk))] if 1 < chunk < self.virtual else []

    def reduced(self, turn: int) -> list[Action]:
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

    def __init__(self, turns: _Turns, settings: MegatronPipeline) -> None:
        self.turns, self.settings = turns, settings
        self.steps: list[Step] = []
        self._inputs: deque[Action] = deque()
        self._gradients: deque[Action] = deque()
        self._pending: dict[str, Action] = {}  # the last send of each kind, unwaited
        self._reduced: set[int] = set()

    def run(self) -> None:
        """Writes the whole program."""
        turns, settings = self.turns, self.settings
        if settings.gathers_together:
            self.steps += [Action("UNSHARD", turns.stage(chunk)) for chunk in (0, 1)]
        if not turns.is_first:
            self._complete([turns.forwards[0]._replace(kind="RECV_F")])
        for turn in range(turns.ahead):
            self._forward_ahead(turn)
        self._begin_turns()
        for turn in range(turns.total - turns.ahead):
            if settings.overlaps_p2p:
                self._overlapped_turn(turn)
            else:
                self._turn(turn)
        for turn in range(turns.total - turns.ahead, turns.total):
            self._backward_behind(turn)
        self._settle("SEND_B")
        if settings.reduces_together:
            left = [turns.stage(chunk) for chunk in range(turns.virtual)]
            self.steps += [Action("REDUCE_GRAD", stage) for stage in left if stage not in self._reduced]

    # ---- parts of the program ----------------------------------------------------------------------------

    def _forward_ahead(self, turn: int) -> None:
        turns = self.turns
        sent, received = turns.sent_forward(turn), turns.received_forward(turn)
        if self.settings.flushes_ahead:
            ahead = [] if turns.is_first else received
            self._use(self._inputs, turns.forwards[turn], is_posting=bool(ahead))
            self._post(ahead, "use")
            self._forward(turn)
            self._post(sent if ahead else sent + received, "use")
            self._keep_send("SEND_F", sent, is_waited=self.settings.waits_sends)
            self._inputs += received
            return
        self._forward(turn)
        is_joined = turn == turns.ahead - 1 < turns.total - 1 and not self.settings.overlaps_p2p
        gradient = self._first_gradient() if is_joined else []
        self._complete(sent + received + gradient)

    def _first_gradient(self) -> list[Action]:
        return [] if self.turns.is_last else [self.turns.backwards[0]._replace(kind="RECV_B")]

    def _begin_turns(self) -> None:
        """The gradient of the first backward is posted after the last warm-up forward, and without overlap in
        one batch with it. If all forwards are ahead, it is received at once.
        """
        if self.turns.ahead == self.turns.total:
            if not self.turns.is_last:
                self._complete(self._first_gradient())
        elif self.settings.overlaps_p2p:
            self._post(self._first_gradient(), "use")
            self._gradients += self._first_gradient()

    def _turn(self, turn: int) -> None:
        """A forward and a backward, then all messages in one batch."""
        turns, ahead = self.turns, turn + self.turns.ahead
        self._both(ahead, turn)
        self._complete(
            turns.sent_forward(ahead)
            + turns.sent_backward(turn)
            + turns.received_forward(ahead)
            + turns.received_backward(turn)
        )

    def _overlapped_turn(self, turn: int) -> None:
        turns, ahead = self.turns, turn + self.turns.ahead
        self._use(self._inputs, turns.forwards[ahead])
        if self.settings.pairs:
            self._use(self._gradients, turns.backwards[turn])
            self._both(ahead, turn)
        else:
            self._forward(ahead)
        sent, received = turns.sent_forward(ahead), turns.received_forward(ahead)
        self._post(sent + received, "use")
        self._keep_send("SEND_F", sent, is_waited=self.settings.waits_sends)
        self._inputs += received
        if not self.settings.pairs:
            self._use(self._gradients, turns.backwards[turn])
            self._backward(turn)
        self._post_backward(turns.sent_backward(turn), turns.received_backward(turn))

    def _backward_behind(self, turn: int) -> None:
        turns = self.turns
        sent, received = turns.sent_backward(turn), turns.received_backward(turn)
        ahead = received if self.settings.flushes_ahead and not turns.is_last else []
        if turn > 0:
            self._use(self._gradients, turns.backwards[turn], is_posting=bool(ahead))
        self._post(ahead, "use")
        self._gradients += ahead
        received = [] if ahead else received
        self._backward(turn)
        if self.settings.flushes_ahead:
            self._post_backward(sent, received)
        else:
            self._complete(sent + received)

    def _forward(self, turn: int) -> None:
        if self.settings.gathers_together:
            self.steps += self.turns.gathered(turn)
        self.steps.append(self.turns.forwards[turn])

    def _both(self, ahead: int, turn: int) -> None:
        """A forward and a backward, as a pair where they are."""
        if not self.settings.pairs:
            self._forward(ahead)
            self._backward(turn)
            return
        if self.settings.gathers_together:
            self.steps += self.turns.gathered(ahead)
        self.steps.append(Overlap(self.turns.forwards[ahead], self.turns.backwards[turn]))
        self._reduce(turn)

    def _backward(self, turn: int) -> None:
        self.steps.append(self.turns.backwards[turn])
        self._reduce(turn)

    def _reduce(self, turn: int) -> None:
        if self.settings.reduces_together:
            reduced = self.turns.reduced(turn)
            self.steps += reduced
            self._reduced |= {one.stage for one in reduced}

    # ---- messages ----------------------------------------------------------------------------------------

    def _complete(self, messages: list[Action]) -> None:
        """Post messages that are waited for at once: a batch and its host wait, even of nothing, or lone
        messages.
        """
        if self.settings.overlaps_p2p:
            self._post(messages, "stream")
        else:
            ordered = sorted(messages, key=lambda one: _BATCH_ORDER.index(one.kind))
            self.steps.append(MessageCall(tuple(ordered), is_batched=True, waits="host"))

    def _post(self, messages: list[Action], waits: Literal["stream", "use"]) -> None:
        """Post lone messages. Even ranks post sends first, odd ranks receives. Between two ranks only, those
        of even ranks and those of odd ones have communicators of their own.
        """
        if not messages:
            return
        is_even = self.turns.rank % 2 == 0
        ordered = sorted(messages, key=lambda one: one.kind.startswith("SEND") != is_even)
        has_own_way = self.turns.ranks == 2
        self.steps.append(MessageCall(tuple(ordered), is_batched=False, waits=waits, has_own_way=has_own_way))

    def _post_backward(self, sent: list[Action], received: list[Action]) -> None:
        self._post(sent + received, "use")
        self._keep_send("SEND_B", sent, is_waited=False)
        self._gradients += received

    def _keep_send(self, kind: str, sent: list[Action], *, is_waited: bool) -> None:
        """Wait for the send before, and for this one if `is_waited`. Otherwise keep it for the next."""
        self._settle(kind)
        if sent:
            self._pending[kind] = sent[0]
        if is_waited:
            self._settle(kind)

    def _settle(self, kind: str) -> None:
        if kind in self._pending:
            self.steps.append(MessageWait((self._pending.pop(kind),)))

    def _use(self, posted: deque[Action], action: Action, *, is_posting: bool = False) -> None:
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
