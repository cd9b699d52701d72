"""Waits of a rank's compute stream, kept column by column."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from zsim.arrays import Floats, Ints, factorize
from zsim.report.views.meanings import BREAKDOWN

CAUSES = tuple(BREAKDOWN)
INDEX_OF_CAUSE = {cause: index for index, cause in enumerate(CAUSES)}
HOST = -1  # in place of an information's index: a wait for the host


class Wait(NamedTuple):
    """An interval in which the compute stream did not compute."""

    start_seconds: float
    end_seconds: float
    cause: str
    info: int | None
    """The index of the span information that it waited for. None where it waited for the host."""
    phase: str

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


class Waits:
    """Waits in the order in which they begin, as columns with one entry per wait.

    `causes` are indices in `CAUSES`. `infos` are indices of span information (`HOST`: a wait for the host).
    """

    def __init__(
        self, starts: Floats, ends: Floats, causes: Ints, infos: Ints, phases: Ints, names: Sequence[str]
    ) -> None:
        """`phases` are indices in `names`."""
        self.seconds: Floats = ends - starts
        self.causes, self.infos = causes, infos
        self.starts, self.ends, self._phases, self._names = starts, ends, phases, names

    def repeat(self, begin: float, end: float, count: float) -> Waits:
        """The waits, with those that begin from `begin` to before `end` `count` times more. These are as many
        times longer instead.
        """
        repeated = Waits(self.starts, self.ends, self.causes, self.infos, self._phases, self._names)
        repeated.seconds = self.seconds * (1.0 + count * ((self.starts >= begin) & (self.starts < end)))
        return repeated

    @staticmethod
    def of(waits: Iterable[Wait]) -> Waits:
        """The waits as columns."""
        starts, ends, causes, infos, phases = [*zip(*waits, strict=True)] or [()] * len(Wait._fields)
        names, phase_of = factorize(phases)
        return Waits(
            np.array(starts, np.float64),
            np.array(ends, np.float64),
            np.array([INDEX_OF_CAUSE[cause] for cause in causes], np.int64),
            np.array([HOST if info is None else info for info in infos], np.int64),
            phase_of,
            names,
        )

    def select_cause(self, cause: str) -> tuple[Ints, Floats]:
        """The infos that waits with this cause were for, and the seconds of each."""
        chosen = (self.causes == INDEX_OF_CAUSE.get(cause, HOST)) & (self.infos != HOST)
        return self.infos[chosen], self.seconds[chosen]

    def __len__(self) -> int:
        return len(self.seconds)

    def __iter__(self) -> Iterator[Wait]:
        starts, ends = self.starts.tolist(), self.ends.tolist()
        causes, infos, phases = self.causes.tolist(), self.infos.tolist(), self._phases.tolist()
        for start, end, cause, info, phase in zip(starts, ends, causes, infos, phases, strict=True):
            yield Wait(start, end, CAUSES[cause], None if info == HOST else info, self._names[phase])


NO_WAITS = Waits.of(())
