"""The Python interface: experiments in, plans, traces and reports out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

from zsim import garbage_collection
from zsim.engine.micro_batches import SimulatedStep, simulate_step
from zsim.engine.simulator import Simulator
from zsim.explain.report_of import report_of_step
from zsim.explain.variants import Variants, full_variants
from zsim.plan import make
from zsim.plan.ops import Plan
from zsim.report.report import Report
from zsim.report.views.displayable import Displayable, Figures
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.load import ExperimentSource, experiment_of
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.trace.trace import Trace
from zsim.validated.verdict import verdict_content

if TYPE_CHECKING:
    from zsim.report.trust import Trust


@dataclass(frozen=True, repr=False, eq=False)
class Result(Displayable):
    """One simulated step: the resolved job, the plan of the ranks, the trace, and the report on it.

    As the last line of a cell it shows its table of numbers. `figures` lists the names for `figure`, `save`
    writes the files of `zsim run --out` but for the traces, and `trust` says how far to believe it.
    """

    file: ClassVar[str] = "report"
    job: Job
    step: SimulatedStep
    report: Report

    @cached_property
    def plan(self) -> Plan:
        """The plan of all ranks, with every micro-batch, unless `[simulation]` asks for few."""
        return make.make_plan(self.job) if self.step.is_loop else self.step.outcome.plan

    @cached_property
    def trace(self) -> Trace:
        """The spans of all simulated ranks. Where micro-batches repeat they are simulated one by one only
        now, since the report does without.
        """
        return self.step.whole_outcome.trace

    def lines(self) -> Iterator[str]:
        """The text that `zsim run` prints, without colour."""
        from zsim.report.views.text.report import report_lines

        return report_lines(self.report)

    def headline(self) -> str:
        from zsim.report.fit import fit_of
        from zsim.report.views.text.sentences import format_trust, headline

        return f"{headline(self.report)}. {fit_of(self.report).label}. {format_trust(self.report)}"

    def records(self) -> Sequence[Mapping[str, Any]]:
        """One row: the numbers of the step, named as in `report.to_dict()`."""
        report, interval = self.report, self.report.step_seconds_range
        return [
            {
                "step_seconds": report.step_seconds,
                "low_seconds": None if interval is None else interval[0],
                "high_seconds": None if interval is None else interval[1],
                "tokens_per_second_per_gpu": report.tokens_per_second_per_gpu,
                "mfu_fraction": report.mfu_fraction,
                "gpu_peak_bytes": report.peaks["gpu"].total,
                "gpu_capacity_bytes": report.capacity_bytes.get("gpu"),
                **verdict_content(report.verdict),
                "limit": report.limit,
            }
        ]

    def plots(self) -> Figures:
        from zsim.report.views.html.report import report_plots

        return report_plots(self.report, self.trace)

    def page(self) -> str:
        from zsim.report.views.html.report import html_report

        return html_report(self.report, self.trace)

    def to_dict(self) -> dict[str, Any]:
        return self.report.to_dict()

    @property
    def trust(self) -> Trust:
        """Should I believe this? The nearest validated runs, and what the step rests on."""
        from zsim.report.trust import trust_of

        return trust_of(self.report)


def make_plan(experiment: ExperimentSource) -> Plan:
    """The plan of one steady step for every rank: ops, bytes, streams. Nothing is simulated."""
    return make.make_plan(resolve(experiment_of(experiment)))


@garbage_collection.pause()
def simulate(
    experiment: Experiment,
    *,
    unfold: bool = False,
    simulator: Simulator | None = None,
    on_job: Callable[[Job], None] | None = None,
    variants: Callable[[SimulatedStep], Variants] | None = full_variants,
) -> Result:
    """Simulate one steady step. `unfold` simulates every rank instead of one representative per class.

    `simulator` is that of the study that the step belongs to. `on_job` is called with the job before it is
    simulated. `variants` gives what the report says of other assumptions (None: nothing).

    Raises InputError for an experiment that contradicts itself, NotSimulatedError for one that zsim cannot
    simulate yet. A job that does not fit is simulated all the same, with `report.fits` False.
    zsim.study.search finds changes that would make it fit.
    """
    start_seconds = time.perf_counter()
    simulator = simulator or Simulator()
    job = simulator.job(experiment)
    if on_job is not None:
        on_job(job)
    step = simulate_step(job, simulate=partial(simulator.outcome, unfold=unfold))
    wall_seconds = time.perf_counter() - start_seconds
    return Result(job, step, report_of_step(step, wall_seconds, variants and variants(step)))
