"""The critical path by cause: computing, HBM, latency, a tier of links, the host, torch's allocator,
offloading."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import compress
from typing import NamedTuple

import numpy as np

from zsim.arrays import Floats, Ints, factorize, unique
from zsim.cost.collectives.rounds import CallLimit
from zsim.cost.rates.power import kernel_activity
from zsim.plan.columns import op_columns
from zsim.plan.ops import (
    Collective,
    DriveIo,
    HostWork,
    Kernels,
    Plan,
    PointToPoint,
    Program,
    RecordedWork,
    Work,
    offload_kind,
)
from zsim.report.critical.path import ALLOCATOR, HOST, OTHERS, Chain, Link
from zsim.report.views.meanings import BREAKDOWN, Meaning
from zsim.specs.cluster.gpu import Gpu

# In the order in which they are shown; other tiers of links (of a fabric) come after the network cards.
CAUSES: dict[str, Meaning] = {
    "compute": Meaning("compute", "#2F7FBF", "blue"),
    "hbm": Meaning("HBM", "#35E8D5", "cyan"),
    "launch": Meaning("gaps between kernels", "#7BC8FE", "cyan"),
    "interference": Meaning("slowed by each other", "#5DBA70", "green"),
    "latency": Meaning("collectives' latency", "#F88805", "yellow"),
    "nvlink": Meaning("NVLink", "#F8C59E", "yellow"),
    "pcie": Meaning("PCIe", "#D8A1B7", "magenta"),
    "network": Meaning("network cards", "#D55E00", "red"),
    "allocator": BREAKDOWN["allocator"],
    "host": Meaning("host", "#8A8F98", "bright_black"),
    "host memory": Meaning("host memory", "#985D7A", "magenta"),
    "cpu": Meaning("CPU", "#922862", "magenta"),
    "drives": Meaning("drives", "#524C97", "magenta"),
    "others": Meaning("other ranks", "#C22336", "red"),
}


def cause_meaning(cause: str) -> Meaning:
    """The meaning of a cause. A tier of links that is not in `CAUSES` is shown by its name."""
    if cause == "c2c":
        return replace(CAUSES["pcie"], label="C2C")
    return CAUSES.get(cause) or Meaning(f"{cause} links", "#6E3B1E", "red")


# The noun after "because of", where it is not the label.
_NOUNS = {
    "host": "the host",
    "cpu": "the CPU",
    "interference": "kernels and collectives that slow each other",
}


def cause_noun(cause: str) -> str:
    """The cause within a sentence: "because of the host", "less compute"."""
    return _NOUNS.get(cause) or cause_meaning(cause).label


_COMPUTING = frozenset({"compute", "hbm", "launch"})
_CAUSE_OF_RESOURCE = {
    "dram": "host memory", "cpu": "cpu", "drive_read": "drives", "drive_write": "drives",
    "drive_time": "drives", "c2c_up": "c2c", "c2c_down": "c2c",
}  # fmt: skip


class IsolatedOp(NamedTuple):
    """An op on an idle machine."""

    causes: Mapping[str, float]
    """Its seconds by cause."""
    seconds: float
    """Its seconds in all."""
    is_computing: bool
    """Whether it runs kernels."""
    shared: str
    """The cause of its resource that others share."""
    slowed_seconds: float
    """Maximum of seconds that kernels can add to a collective (else 0)."""

    @staticmethod
    def of(causes: Mapping[str, float], slowed_seconds: float = 0.0) -> IsolatedOp:
        shared = next((cause for cause in causes if cause != "latency"), "latency")
        is_computing = causes.keys() <= _COMPUTING
        return IsolatedOp(causes, sum(causes.values()), is_computing, shared, slowed_seconds)


_NO_OP = {
    HOST: IsolatedOp.of({"host": 0.0}),
    OTHERS: IsolatedOp.of({"others": 0.0}),
    ALLOCATOR: IsolatedOp.of({"allocator": 0.0}),
}


class OpCauses:
    """Seconds by cause of each op on an idle machine, computed once per distinct work.

    `gpu` is that of all ranks, or one per program. `call_limits` has the limit of each collective, and
    `limits` the class of resources that bounds each kind of offloaded work
    (`zsim.engine.offload.Offload.limits`).
    """

    def __init__(
        self,
        plan: Plan,
        gpu: Gpu | Sequence[Gpu],
        call_limits: Mapping[Collective | PointToPoint, CallLimit],
        limits: Mapping[str, str],
    ) -> None:
        self._plan = plan
        self._gpus = [gpu] * len(plan.programs) if isinstance(gpu, Gpu) else gpu
        self._call_limits, self._limits = call_limits, limits

    def isolated_ops(self, ops: Ints, ranks: Ints) -> tuple[list[IsolatedOp], Ints]:
        """The distinct ones among the ranks' ops (or the number that stands in place of an op in a chain),
        each on an idle machine, and the index of each op among them.
        """
        isolated: list[IsolatedOp] = []
        indices = np.empty(len(ops), dtype=np.int64)
        for number in unique(ops[ops < 0]):
            indices[ops == number] = len(isolated)
            isolated.append(_NO_OP[number])
        programs = self._plan.program_of[ranks]
        for program in unique(programs):
            is_in_program = (programs == program) & (ops >= 0)
            payloads, payload_of = self._plan.programs[program].memoize(_payloads_of_ops)
            is_needed = np.bincount(payload_of[ops[is_in_program]], minlength=len(payloads)) > 0
            indices[is_in_program] = (len(isolated) - 1 + np.cumsum(is_needed))[
                payload_of[ops[is_in_program]]
            ]
            isolated += [
                self._isolated_op(work, self._gpus[program]) for work in compress(payloads, is_needed)
            ]
        return isolated, indices

    def _isolated_op(self, work: Work | None, gpu: Gpu) -> IsolatedOp:
        slowed_seconds = (
            self._call_limits[work].slowed_seconds if isinstance(work, Collective | PointToPoint) else 0.0
        )
        return IsolatedOp.of(self._causes(work, gpu), slowed_seconds)

    def _causes(self, work: Work | None, gpu: Gpu) -> dict[str, float]:
        if isinstance(work, Kernels):
            activity = kernel_activity(work.kernels, gpu)
            return {"compute": activity.compute, "hbm": activity.memory, "launch": activity.idle}
        if isinstance(work, Collective | PointToPoint):
            limit = self._call_limits[work]
            return {
                limit.tier or "latency": max(limit.seconds - limit.latency_seconds, 0.0),
                "latency": limit.latency_seconds,
            }
        if work is None:
            return {"host": 0.0}
        assert not isinstance(work, RecordedWork), "a recorded rank is replayed, and not taken apart"
        resource = self._limits.get(offload_kind(work), "")
        default = "cpu" if isinstance(work, HostWork) else "drives" if isinstance(work, DriveIo) else "pcie"
        return {_CAUSE_OF_RESOURCE.get(resource, default): 0.0}


def _payloads_of_ops(program: Program) -> tuple[list[Work | None], Ints]:
    """The distinct works of a program's ops, and the index of each op's work among them, to be cached with
    the program.
    """
    payloads = program.memoize(op_columns).work
    by_id = {id(work): work for work in payloads}
    ids, indices = factorize(list(map(id, payloads)))
    return [by_id[number] for number in ids], indices


def critical_seconds(links: Chain | Iterable[Link], causes: OpCauses) -> dict[str, float]:
    """Seconds of the chain by cause. They add up to the chain.

    Extra time of an op over its time on an idle machine is `interference` for kernels (slowed by collectives,
    by other kernels or by a slow GPU) and for collectives up to `IsolatedOp.slowed_seconds`. The rest of a
    transfer's extra time counts for the resource that bounds it, which others share.
    """
    chain = links if isinstance(links, Chain) else Chain.of(links)
    isolated_ops, indices = causes.isolated_ops(chain.ops, chain.ranks)
    actual_seconds, isolated_seconds = (
        chain.ends - chain.starts,
        np.array([op.seconds for op in isolated_ops])[indices],
    )
    max_slowed = np.array([math.inf if op.is_computing else op.slowed_seconds for op in isolated_ops])[
        indices
    ]
    extra = np.maximum(actual_seconds - isolated_seconds, 0.0)
    slowed = np.minimum(extra, max_slowed)
    shared = extra - slowed
    is_shorter = actual_seconds < isolated_seconds
    totals = {"interference": _sum_in_order(slowed)}
    for cause in dict.fromkeys(cause for op in isolated_ops for cause in op.causes):
        seconds = np.array([op.causes.get(cause, 0.0) for op in isolated_ops])[indices]
        seconds = np.divide(seconds * actual_seconds, isolated_seconds, out=seconds, where=is_shorter)
        are_of_shared = np.array([op.shared == cause for op in isolated_ops])
        totals[cause] = _sum_in_order(seconds + are_of_shared[indices] * shared)
    return {cause: totals[cause] for cause in _sort_causes(totals) if totals[cause] > 0}


def _sum_in_order(seconds: Floats) -> float:
    """The sum of numbers that are added one after the other."""
    return float(np.cumsum(seconds)[-1]) if len(seconds) else 0.0


class CriticalSeconds(Mapping[str, float]):
    """Seconds of the critical path by cause, computed when they are first read: few readers of a report ask
    for them."""

    def __init__(self, compute: Callable[[], dict[str, float]]) -> None:
        self._compute: Callable[[], dict[str, float]] | None = compute

    @cached_property
    def _seconds(self) -> dict[str, float]:
        assert self._compute is not None
        seconds, self._compute = self._compute(), None  # lets go of the trace
        return seconds

    def __getitem__(self, cause: str) -> float:
        return self._seconds[cause]

    def __iter__(self) -> Iterator[str]:
        return iter(self._seconds)

    def __len__(self) -> int:
        return len(self._seconds)

    def __repr__(self) -> str:
        return repr(self._seconds)

    def __reduce__(self) -> tuple[type[dict[str, float]], tuple[dict[str, float]]]:
        return dict, (self._seconds,)


def _sort_causes(causes: Iterable[str]) -> list[str]:
    """Causes in the order of `CAUSES`. Tiers that are not in it (spines of a fabric) come after the network
    cards.
    """
    ranks = {cause: float(rank) for rank, cause in enumerate(CAUSES)}
    between = ranks["network"] + 0.5
    return sorted(causes, key=lambda cause: (ranks.get(cause, between), cause))
