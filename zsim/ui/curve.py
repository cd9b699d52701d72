"""The scaling curve of the page, computed one point at a time, so that the page never waits for all
points."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import field
from pathlib import Path
from threading import Lock

from zsim.dataclass import dataclass
from zsim.errors import NotSimulatedError
from zsim.report.views.html.figure import Figure
from zsim.specs.experiment.tables import Experiment
from zsim.study.scaling.page import efficiency, throughput
from zsim.study.scaling.scaling import Mode, run_scaling
from zsim.study.scaling.text import sentences

_TRIES = 2


@dataclass(frozen=True)
class Curve:
    """The curve so far, as the figures and sentences of the scaling study."""

    figures: Mapping[str, Figure]
    words: str


@dataclass(frozen=True)
class Curves:
    """Curves by experiment; points that exist in `folder` are not simulated again. They are computed one at a
    time in a process of their own, so that they do not delay the settings."""

    folder: Path
    pools: list[ProcessPoolExecutor] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)

    def upto(self, experiment: Experiment, counts: Sequence[int], mode: Mode) -> Curve:
        """The curve over `counts`.

        Raises InputError where no count can be simulated, NotSimulatedError where the process dies again.
        """
        for _ in range(_TRIES):
            try:
                return self._begun(experiment, counts, mode).result()
            except BrokenProcessPool:
                continue
        raise NotSimulatedError(
            f"the process that computes the curve died {_TRIES} times (killed, or out of memory?)"
        )

    def _begun(self, experiment: Experiment, counts: Sequence[int], mode: Mode) -> Future[Curve]:
        with self.lock:
            try:
                return self.pools[0].submit(curve, experiment, counts, mode, self.folder)
            except (IndexError, BrokenProcessPool):
                fresh = multiprocessing.get_context("spawn")
                self.pools[:] = [ProcessPoolExecutor(1, fresh, _leave_interrupts_to_the_page)]
                return self.pools[0].submit(curve, experiment, counts, mode, self.folder)


def curve(experiment: Experiment, counts: Sequence[int], mode: Mode, folder: Path) -> Curve:
    """The curve over `counts`; its points are kept in `folder`. Raises as `run_scaling` does."""
    scaling = run_scaling(experiment, counts, mode, folder, is_quiet=True)
    figures = {"efficiency": efficiency(scaling), "throughput": throughput(scaling)}
    lost = [f"{scale.gpus:,} GPUs: {scale.error}." for scale in scaling.scales if scale.error]
    return Curve(figures, " ".join([*sentences(scaling), *lost]))


def _leave_interrupts_to_the_page() -> None:
    """Ctrl-C reaches this process too, and ends it without a word."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
