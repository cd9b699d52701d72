"""DeepCompile's graphs of a model's forward and backward, and its passes that move gathers.

Transcribed from DeepSpeed 0.19.6 `compile/passes/zero3_compile.py`, `prefetch.py`, `selective_gather.py` and
`offload_adam_states.py`.

# [Note: nodes]
A node here is a module's call in forward, recomputation or backward, where theirs is an operator. A parameter
is gathered before its first node of a graph and released after the last. Recomputation is part of the graph
of backward, so that a checkpointed block's weights stay from there to their backward.

# [Note: gathers ahead]
`schedule_prefetch` goes through a graph from its end and carries the gathers that it meets along, to earlier
places, until they are more than 4 GB or would not fit beside what the next node has in the profile. Then the
gathers that are needed last are left there. Neighbours become one call if the larger of their predicted times
by 1.2 is above that of the call, which is taken here by bytes, without latencies.

# [Note: states that leave]
`move_opt_states` goes through the states in the order of sub-groups, for each its moments and its masters.
The first of them leave at the head of forward, so many that the others fit beside forward's peak. In backward
the next of them comes back behind the first node from which on it fits beside what any later node takes and
what came back before. Those that never fit come back at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from zsim.operations.operation import Role
from zsim.plan.ops import Phase
from zsim.plan.workload.workload import ModuleCall, Workload

_MAX_FUSED_BYTES = 1e9
_MAX_BUFFERED_BYTES = 4e9
_FUSE_FACTOR = 1.2

Groups = tuple[tuple[int, ...], ...]  # parameters, by the call that gathers them


@dataclass(frozen=True, slots=True)
class CompiledGraphs:
    """The nodes of forward, then those of backward. See [Note: nodes]."""

    nodes: tuple[tuple[Phase, str], ...]
    """The phase and the name of every node's call."""
    num_forward: int
    """The number of nodes of forward."""
    gathers: tuple[tuple[int, ...], ...]
    """The parameters whose first use in a graph is a node's."""
    releases: tuple[tuple[int, ...], ...]
    """The parameters whose last use in a graph is a node's."""

    @property
    def graphs(self) -> tuple[range, range]:
        """The numbers of the nodes of forward and of backward."""
        return range(self.num_forward), range(self.num_forward, len(self.nodes))


def compiled_graphs(workload: Workload, parameters: dict[str, tuple[int, ...]]) -> CompiledGraphs:
    """The graphs of a workload whose modules read `parameters`, by the names of their calls."""
    forward: list[tuple[Phase, ModuleCall]] = [
        ("forward", call) for segment in workload.segments for call in segment.calls
    ]
    steps = [*forward, *_backward_steps(workload)]
    graphs = range(len(forward)), range(len(forward), len(steps))
    gathers: list[list[int]] = [[] for _ in steps]
    releases: list[list[int]] = [[] for _ in steps]
    for graph in graphs:
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for node in graph:
            phase, call = steps[node]
            if phase == "backward" and call.module.role is Role.EMBEDDING:
                continue  # whose backward needs no weight
            for number in parameters.get(call.name, ()):
                first.setdefault(number, node)
                last[number] = node
        for number, node in first.items():
            gathers[node].append(number)
        for number, node in last.items():
            releases[node].append(number)
    return CompiledGraphs(
        tuple((phase, call.name) for phase, call in steps),
        len(forward),
        tuple(map(tuple, gathers)),
        tuple(map(tuple, releases)),
    )


def _backward_steps(workload: Workload) -> Iterator[tuple[Phase, ModuleCall]]:
    """The calls of backward in the order of `zsim.plan.walk`."""
    for segment in reversed(workload.segments):
        if not segment.has_backward:
            continue
        for number, call in enumerate(segment.backward_calls):
            if segment.is_checkpointed and number == segment.num_before_recomputation:
                for recomputed in segment.recomputed:
                    yield "recompute", recomputed
                if segment.stops_at is not None:
                    yield "recompute", segment.stops_at
            for rerun in segment.reruns_by_last_call.get(call.name, ()):
                yield "recompute", rerun
            if call.module.has_backward:
                yield "backward", call


@dataclass(slots=True)
class _Ahead:
    """The gathers that are carried along. `groups` are complete calls, the one needed last first."""

    sizes: Sequence[int]
    groups: list[list[int]] = field(default_factory=list)
    open: list[int] = field(default_factory=list)
    """The parameters of the call that may still grow."""

    def bytes_of(self, numbers: Sequence[int]) -> int:
        return sum(self.sizes[number] for number in numbers)

    @property
    def total_bytes(self) -> int:
        return sum(map(self.bytes_of, self.groups)) + self.bytes_of(self.open)

    def add(self, number: int) -> None:
        now, size = self.bytes_of(self.open), self.sizes[number]
        is_cheap = max(now, size) * _FUSE_FACTOR > now + size and now + size < _MAX_FUSED_BYTES
        if self.open and not is_cheap:
            self.close()
        self.open.append(number)

    def close(self) -> None:
        if self.open:
            self.groups.append(self.open)
            self.open = []

    def take(self) -> list[int] | None:
        """The call that is needed last. None where there is none."""
        if not self.groups:
            self.close()
        return self.groups.pop(0) if self.groups else None


def gathers_ahead(
    graphs: CompiledGraphs, peaks: Sequence[int], sizes: Sequence[int], limit: int
) -> dict[int, Groups]:
    """The calls that are issued before each node, in order. `peaks` are the bytes that each node has at most
    without them, `sizes` those of a gathered parameter, `limit` the bytes that both may take together. See
    [Note: gathers ahead].
    """
    launches: dict[int, list[list[int]]] = {}

    def leave(ahead: _Ahead, node: int, peak: int) -> None:
        """Leave calls in front of `node` until the others fit beside `peak` bytes."""
        while peak + ahead.total_bytes > limit or ahead.total_bytes > _MAX_BUFFERED_BYTES:
            group = ahead.take()
            if group is None:
                return
            launches.setdefault(node, []).append(group)

    for graph in graphs.graphs:
        ahead = _Ahead(sizes)
        for node in reversed(graph):
            peak = peaks[max(node - 1, graph.start)]
            for number in reversed(graphs.gathers[node]):
                leave(ahead, node, peak)
                ahead.add(number)
            if node > graph.start:
                leave(ahead, node, peak)
        while (group := ahead.take()) is not None:
            launches.setdefault(graph.start, []).append(group)
    return {
        node: tuple(tuple(reversed(group)) for group in reversed(groups)) for node, groups in launches.items()
    }


def kept_gathered(graphs: CompiledGraphs, sizes: Sequence[int], room: int) -> frozenset[int]:
    """The parameters that stay gathered in `room` bytes: those whose gathers take most time for a byte, the
    smallest, until one does not fit.
    """
    in_order = dict.fromkeys(number for numbers in graphs.gathers for number in numbers)
    kept: list[int] = []
    for number in sorted(in_order, key=lambda number: sizes[number]):
        room -= sizes[number]
        if room < 0:
            break
        kept.append(number)
    return frozenset(kept)


def states_that_leave(sizes: Sequence[int], peak: int, limit: int) -> int:
    """How many states, of `sizes` bytes and from the first on, leave the GPU so that the others fit beside
    forward's `peak`. See [Note: states that leave].
    """
    count, kept = 0, sum(sizes)
    while count < len(sizes) and peak + kept > limit:
        kept -= sizes[count]
        count += 1
    return count


def returns_of_states(
    sizes: Sequence[int], graph: range, peaks: Sequence[int], limit: int
) -> dict[int, tuple[int, ...]]:
    """The states that come back behind each node of backward, by their numbers. `peaks` are the bytes that
    each of its nodes takes. See [Note: states that leave].
    """
    later = list(accumulate(reversed(peaks), max))[::-1]
    returns: dict[int, tuple[int, ...]] = {}
    number, back = 0, 0
    for node, peak in zip(graph, later, strict=True):
        first = number
        while number < len(sizes) and peak + back + sizes[number] < limit:
            back += sizes[number]
            number += 1
        if number > first:
            returns[node] = tuple(range(first, number))
    if number < len(sizes):
        returns[graph.stop - 1] = (*returns.get(graph.stop - 1, ()), *range(number, len(sizes)))
    return returns
