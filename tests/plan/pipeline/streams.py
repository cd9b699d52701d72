"""Programs of pipeline ranks played on streams without time: who waits for whom, and whether all end.

A rank has a host that issues (and waits, where shapes go ahead, for the whole message), a compute stream, a
stream for batches on the group's communicator and one for each pair's. A message begins when all before it on
its stream are done and the compute stream has come to where it was posted; it ends when the other side has
begun its own. As NCCL has it, the n-th send to a rank on a communicator meets that rank's n-th receive,
whatever they carry.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from zsim.plan.actions import Action, Kind, MessageCall, MessageWait, Overlap, Step

Way = tuple[Any, int, int]  # communicator, sender, receiver


@dataclass
class Posted:
    """An operation on a communicator's stream: a batch, or a lone message."""

    messages: list[Action]
    is_reached: bool = False  # by the compute stream
    is_begun: bool = False
    left: int = 0

    @property
    def is_done(self) -> bool:
        return self.is_begun and self.left == 0


@dataclass
class Rank:
    """One rank's host and streams. `compute` holds actions, operations to wait for, and `Reach` marks."""

    number: int
    steps: Sequence[Step]
    position: int = 0
    blocked: list[Posted] = field(default_factory=list)
    is_blocked: bool = False
    compute: deque[tuple[str, Any]] = field(default_factory=deque)
    streams: dict[Any, deque[Posted]] = field(default_factory=lambda: defaultdict(deque))
    by_message: dict[Action, Posted] = field(default_factory=dict)
    for_use: set[Action] = field(default_factory=set)
    waited: set[Action] = field(default_factory=set)
    done: set[Action] = field(default_factory=set)


class Playing:
    """All ranks; `play` runs them to their ends or to where they are stuck."""

    def __init__(self, programs: Sequence[Sequence[Step]], rank_of: Sequence[int]) -> None:
        self.ranks = [Rank(number, steps) for number, steps in enumerate(programs)]
        self.rank_of = rank_of
        self.sends: dict[Way, deque[tuple[Posted, Action]]] = defaultdict(deque)
        self.receives: dict[Way, deque[tuple[Posted, Action]]] = defaultdict(deque)

    def play(self) -> list[str]:
        """The steps that ranks are stuck at; none if all have come to their ends."""
        is_moving = True
        while is_moving:
            moved = [self._advance(rank) for rank in self.ranks]
            is_moving = any(moved)
        return [
            f"rank {rank.number}: {list(rank.compute)[:2] or rank.steps[rank.position - 1]}"
            for rank in self.ranks
            if rank.compute or rank.is_blocked or any(rank.streams.values())
        ]

    def _advance(self, rank: Rank) -> bool:
        moved = False
        while self._host(rank) or self._compute(rank) or self._streams(rank):
            moved = True
        return moved

    # ---- host ------------------------------------------------------------

    def _host(self, rank: Rank) -> bool:
        if rank.is_blocked:
            if rank.compute or not all(one.is_done for one in rank.blocked):
                return False
            rank.is_blocked = False
            return True
        if rank.position == len(rank.steps):
            return False
        step = rank.steps[rank.position]
        assert not isinstance(step, Overlap), "torch's runtime has none"
        rank.position += 1
        if isinstance(step, Action):
            received = step._replace(kind="RECV_F" if step.kind == "F" else "RECV_B")
            if step.kind in ("F", "B", "I") and received in rank.for_use:
                rank.compute.append(("wait", [rank.by_message[received]]))
                rank.waited.add(received)
            rank.compute.append(("action", step))
        elif isinstance(step, MessageWait):
            assert set(step.messages) <= rank.for_use, f"{step} waits for what is not on its way"
            rank.compute.append(("wait", [rank.by_message[one] for one in step.messages]))
            rank.waited |= set(step.messages)
        else:
            self._post(rank, step)
        return True

    def _post(self, rank: Rank, call: MessageCall) -> None:
        groups = [list(call.messages)] if call.is_batched else [[one] for one in call.messages]
        posted = [Posted(group, left=len(group)) for group in groups if group]
        for one in posted:
            rank.streams[self._stream(rank, call, one.messages[0])].append(one)
            rank.by_message.update(dict.fromkeys(one.messages, one))
            rank.compute.append(("reach", one))
        if call.waits == "use":
            rank.for_use |= set(call.messages)
            return
        rank.compute.append(("wait", posted))
        rank.waited |= set(call.messages)
        if call.waits == "host" or call.num_shape_messages:
            rank.blocked, rank.is_blocked = posted, True

    def _stream(self, rank: Rank, call: MessageCall, message: Action) -> Any:
        if call.is_batched:
            return "group"
        sender, receiver = self._ends(rank, message)
        pair = (min(sender, receiver), max(sender, receiver))
        return (*pair, sender % 2) if call.has_communicator_per_direction else pair

    def _ends(self, rank: Rank, message: Action) -> tuple[int, int]:
        """Sender and receiver of a message of `rank`."""
        ahead = message.kind in ("SEND_F", "RECV_B")
        peer = self.rank_of[message.stage + (1 if ahead else -1)]
        assert peer != rank.number, message
        assert self.rank_of[message.stage] == rank.number, message
        return (rank.number, peer) if message.kind.startswith("SEND") else (peer, rank.number)

    # ---- streams ------------------------------------------------------------

    def _compute(self, rank: Rank) -> bool:
        if not rank.compute:
            return False
        kind, item = rank.compute[0]
        if kind == "wait" and not all(one.is_done for one in item):
            return False
        if kind == "reach":
            item.is_reached = True
            for message in item.messages:
                assert self._is_made(rank, message), f"{message} too early"
        elif kind == "action":
            self._check_input(rank, item)
            rank.done.add(item)
        rank.compute.popleft()
        return True

    def _is_made(self, rank: Rank, message: Action) -> bool:
        """Whether the rank has computed what it sends."""
        makers: dict[str, tuple[Kind, ...]] = {"SEND_F": ("F",), "SEND_B": ("B", "I")}
        kinds = makers.get(message.kind, ())
        return not kinds or any(message._replace(kind=kind) in rank.done for kind in kinds)

    def _check_input(self, rank: Rank, action: Action) -> None:
        """A computation has the rank's own result, or a receive that its stream has waited for."""
        assert action not in rank.done, f"{action} twice"
        stage, last = action.stage, len(self.rank_of) - 1
        if action.kind == "F" and stage > 0:
            before, received = [Action("F", stage - 1, action.micro_batch)], action._replace(kind="RECV_F")
        elif action.kind in ("B", "I") and stage < last:
            before = [Action("B", stage + 1, action.micro_batch), Action("I", stage + 1, action.micro_batch)]
            received = action._replace(kind="RECV_B")
        else:
            return
        has_own = any(one in rank.done for one in before)
        assert received in rank.waited or has_own, f"{action} without its input"

    def _streams(self, rank: Rank) -> bool:
        moved = False
        for stream, queue in rank.streams.items():
            while queue and queue[0].is_done:
                queue.popleft()
                moved = True
            if queue and queue[0].is_reached and not queue[0].is_begun:
                queue[0].is_begun = moved = True
                for message in queue[0].messages:
                    self._begin(rank, stream, queue[0], message)
        return moved

    def _begin(self, rank: Rank, stream: Any, posted: Posted, message: Action) -> None:
        way = (stream, *self._ends(rank, message))
        here, there = (
            (self.sends, self.receives) if message.kind.startswith("SEND") else (self.receives, self.sends)
        )
        if not there[way]:
            here[way].append((posted, message))
            return
        other, met = there[way].popleft()
        sent, got = (message, met) if message.kind.startswith("SEND") else (met, message)
        step = 1 if sent.kind == "SEND_F" else -1
        expected = Action("RECV_F" if step == 1 else "RECV_B", sent.stage + step, sent.micro_batch)
        assert got == expected, f"{sent} meets {got}"
        posted.left -= 1
        other.left -= 1
