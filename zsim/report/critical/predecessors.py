"""The ops that an op of a program waits for."""

from __future__ import annotations

from zsim.plan.columns import op_columns
from zsim.plan.ops import Program
from zsim.plan.passes.queues import queued_behind
from zsim.specs.strategy.training import DEFAULT_CONNECTIONS


class Predecessors:
    """The ops with work that must end before an op may start, as places among the ops with work (`numbers`).
    Ops without work (waits, hooks) are replaced by their predecessors. `ahead[place]`: the launch right
    before the one at `place` in a hardware queue that streams share."""

    def __init__(self, program: Program, connections: int = DEFAULT_CONNECTIONS) -> None:
        self._ops = program.ops
        self.numbers: list[int] = []
        self._place_of: dict[int, int] = {}
        last_on_stream: dict[str, int] = {}
        self._on_stream: list[int] = []
        columns = program.once(op_columns)
        for number, (stream, work) in enumerate(zip(columns.stream, columns.work, strict=True)):
            if work is not None:
                place = self._place_of[number] = len(self.numbers)
                self.numbers.append(number)
                self._on_stream.append(last_on_stream.get(stream, -1))
                last_on_stream[stream] = place
        self._found: dict[int, tuple[int, ...]] = {}
        self.ahead: dict[int, int] = {}
        behind = program.once(queued_behind, connections)
        for number, held in enumerate(behind or ()):
            if held >= 0:
                self.ahead[self._place_of[held]] = self._place_of[number]

    def of(self, place: int) -> tuple[int, ...]:
        """The places that the op at `place` waits for."""
        found = self._found.get(place)
        if found is None:
            after = self._ops[self.numbers[place]].after
            on_stream = self._on_stream[place]
            alone = (on_stream,) if on_stream >= 0 else ()
            found = self._found[place] = tuple(self._before(place)) if after else alone
        return found

    def _before(self, place: int) -> list[int]:
        on_stream = self._on_stream[place]
        found = [on_stream] if on_stream >= 0 else []
        waiting = list(self._ops[self.numbers[place]].after)
        seen: set[int] = set()
        while waiting:
            number = waiting.pop()
            known = self._place_of.get(number)
            if known is not None:
                found.append(known)
            elif number not in seen:
                seen.add(number)
                waiting.extend(self._ops[number].after)
        return found


def predecessors(program: Program, connections: int) -> Predecessors:
    """The predecessors of a program's ops, for `Program.once`."""
    return Predecessors(program, connections)
