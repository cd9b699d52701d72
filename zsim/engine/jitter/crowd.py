"""The slowest of many: what jitter makes of a class of ranks that one lane stands for.

# [Note: the slowest of many]
A lane that draws jitter for itself is a typical rank. What a step waits for is the slowest of thousands, and
that is another one at every meeting. Taking the largest factor for every kernel would be far too slow (no
rank is the slowest at everything), taking one rank's sum over the step too fast (they meet on the way). So
all ranks of the class are drawn and sent through the program at once, without a clock: kernels take their
own time, a collective begins when the last of its group arrives and lasts as long as it did without jitter.
Between meetings that gives E = max of the ends - max of the starts over the class, the work of an envelope
that the slowest always touch; and one lane with that work does on the clock what the whole class would.

The stretches between meetings are sums of kernels, so the normal law is near; ranks that are more than five
of its standard deviations faster than the slowest all through the run are never the slowest anywhere and
are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from zsim.arrays import Floats, Ints
from zsim.engine.executor import Executor
from zsim.engine.jitter.draw import lognormal, spread
from zsim.engine.prepare import Prepared, Seconds
from zsim.plan.ops import Collective

_FAR = 5.0  # standard deviations
_FEWEST = 256

Times = Floats | float


@dataclass(slots=True)
class _Node:
    """Ops that pass at one stretch: kernels in a row, or a collective, or something else of fixed length.

    `seconds`: per class; `sigma`: of the kernels' sum; `group`: of a collective.
    """

    ops: list[int]
    before: list[int]
    seconds: Floats
    sigma: float = 0.0
    group: str | None = None
    is_kernels: bool = False
    last_use: int = 0


@dataclass(slots=True)
class _Groups:
    """The groups of one kind, among the ranks that are drawn: `order` sorts them by group, `starts` is where
    each begins in it, `of_rank` is which group every rank is in."""

    order: Ints
    starts: Ints
    of_rank: Ints

    def last(self, times: Times) -> Times:
        """Per rank, when the last of its group arrives."""
        if isinstance(times, float):
            return times
        if len(self.starts) == 1:
            return float(times.max())
        found: Floats = np.maximum.reduceat(times[self.order], self.starts)[self.of_rank]
        return found


@dataclass
class Crowd:
    """All ranks of a job on their way through its program.

    `base` is a run of it without jitter; `rank_factors` are the ranks' own.
    """

    prepared: Prepared
    base: Executor
    rank_factors: Floats
    kernel_sigma: float
    _nodes: list[_Node] = field(init=False)

    def __post_init__(self) -> None:
        self._nodes = _nodes(self.prepared, self.base, self.kernel_sigma)
        classes = self.prepared.classes
        typical = _typical_sigma(self._nodes)
        kept = []
        for number in range(len(classes.sizes)):
            members = np.flatnonzero(classes.of_rank == number)
            own = self.rank_factors[members]
            least = float(own.max()) * np.exp(-_FAR * typical)
            order = np.argsort(-own, kind="stable")
            count = max(int((own >= least).sum()), min(_FEWEST, len(members)))
            kept.append(members[order[:count]])
        ranks = np.sort(np.concatenate(kept))
        self._ranks = ranks
        self._of_rank = classes.of_rank[ranks]
        self._members = [np.flatnonzero(self._of_rank == number) for number in range(len(kept))]
        self._groups = {
            name: _groups_of(group.row_of(self.prepared.job.world_size)[ranks])
            for name, group in self.prepared.plan.groups.items()
        }

    def step(self, generator: np.random.Generator) -> list[Seconds]:
        """One step: per class, the kernels of its envelope; see [Note: the slowest of many]."""
        found: list[list[float | None]] = [list(own) for own in self.prepared.kernel_seconds]
        factors = self.rank_factors[self._ranks]
        ends: dict[int, Times] = {}
        for number, node in enumerate(self._nodes):
            start = _latest([ends[before] for before in node.before])
            if node.is_kernels:
                normal = generator.standard_normal(len(factors))
                factor: Floats = factors * lognormal(normal, node.sigma)
                ends[number] = start + factor * node.seconds[self._of_rank]
                self._keep_envelope(node, start, ends[number], found)
            elif node.group is not None:
                ends[number] = self._groups[node.group].last(start) + self._each(node.seconds)
            else:
                ends[number] = start + self._each(node.seconds)
            for before in node.before:
                if self._nodes[before].last_use == number:
                    ends.pop(before, None)
        return list(found)

    def _each(self, seconds: Floats) -> Times:
        return float(seconds[0]) if (seconds == seconds[0]).all() else seconds[self._of_rank]

    def _keep_envelope(
        self, node: _Node, start: Times, end: Times, found: Sequence[list[float | None]]
    ) -> None:
        assert not isinstance(end, float)
        for number, members in enumerate(self._members):
            began = start if isinstance(start, float) else float(start[members].max())
            work = float(end[members].max()) - began
            scale = work / float(node.seconds[number]) if node.seconds[number] > 0 else 1.0
            for op in node.ops:
                seconds = found[number][op]
                assert seconds is not None
                found[number][op] = seconds * scale


def _latest(times: Sequence[Times]) -> Times:
    latest: Times = 0.0
    for other in times:
        latest = np.maximum(latest, other)
    return latest


def _groups_of(rows: Ints) -> _Groups:
    names, of_rank = np.unique(rows, return_inverse=True)
    order = np.argsort(of_rank, kind="stable")
    starts = np.searchsorted(of_rank[order], np.arange(len(names)))
    return _Groups(order, starts, of_rank)


def _typical_sigma(nodes: Sequence[_Node]) -> float:
    """The spread of a stretch of kernels, by their time."""
    weights = np.array([float(node.seconds.mean()) for node in nodes if node.is_kernels])
    squares = np.array([node.sigma**2 for node in nodes if node.is_kernels])
    return float(np.sqrt((weights * squares).sum() / weights.sum())) if weights.sum() > 0 else 0.0


def _nodes(prepared: Prepared, base: Executor, sigma: float) -> list[_Node]:
    """The program as stretches, in an order in which each comes after what it waits for."""
    program = prepared.program
    before = _predecessors(program.successors)
    waited = {op for waits in program.host_waits for op in waits}
    nodes: list[_Node] = []
    of_op: list[int] = []
    host = -1  # the stretch after which the host is free
    for op, waits in enumerate(program.host_waits):
        if waits:
            of_host = {of_op[other] for other in waits} | ({host} if host >= 0 else set())
            host = _event(nodes, sorted(of_host))
        needs = sorted({of_op[other] for other in before[op]} | ({host} if host >= 0 else set()))
        work = program.plan.ops[op].work
        if work is None:
            of_op.append(needs[0] if len(needs) == 1 else _event(nodes, needs))
        elif program.kernel_seconds[op] is not None:
            previous = before[op][0] if len(before[op]) == 1 else -1
            joins = previous >= 0 and previous not in waited and len(program.successors[previous]) == 1
            joins = joins and nodes[of_op[previous]].is_kernels and nodes[of_op[previous]].ops[-1] == previous
            if joins and set(needs) <= {of_op[previous], *nodes[of_op[previous]].before}:
                nodes[of_op[previous]].ops.append(op)
                of_op.append(of_op[previous])
            else:
                nodes.append(_Node([op], needs, np.zeros(0), is_kernels=True))
                of_op.append(len(nodes) - 1)
        else:
            group = work.group if isinstance(work, Collective) else None
            nodes.append(_Node([op], needs, _lasted(base, op, group), group=group))
            of_op.append(len(nodes) - 1)
    for number, node in enumerate(nodes):
        if node.is_kernels:
            each = np.array([[lane.ended[op] - lane.start[op] for op in node.ops] for lane in base.lanes])
            node.seconds = each.sum(axis=1)
            parts = np.array([program.concentration[op] for op in node.ops]) * each[0] ** 2
            total = float(node.seconds[0])
            concentration = float(parts.sum()) / total**2 if total > 0 else 0.0
            node.sigma = float(spread(sigma, np.array([concentration]))[0])
        for other in node.before:
            nodes[other].last_use = number
    return nodes


def _event(nodes: list[_Node], needs: list[int]) -> int:
    nodes.append(_Node([], needs, np.zeros(1)))
    return len(nodes) - 1


def _predecessors(successors: Sequence[Sequence[int]]) -> list[list[int]]:
    before: list[list[int]] = [[] for _ in successors]
    for op, others in enumerate(successors):
        for other in others:
            before[other].append(op)
    return before


def _lasted(base: Executor, op: int, group: str | None) -> Floats:
    """Per lane, how long an op took once it could begin; a collective begins with the last of its group."""
    starts = [lane.start[op] for lane in base.lanes]
    if group is not None:
        latest: Mapping[int, float] = {}
        for lane, start in zip(base.lanes, starts, strict=True):
            instance = lane.instances[group]
            latest = {**latest, instance: max(latest.get(instance, 0.0), start)}
        starts = [latest[lane.instances[group]] for lane in base.lanes]
    return np.array([lane.ended[op] - start for lane, start in zip(base.lanes, starts, strict=True)])
