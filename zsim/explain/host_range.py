"""The error bar of a step that waits for its host: simulations with hosts as fast and as slow as they are."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from zsim.cost.rates.host_calls import HostCosts, host_seconds, shipped_host_costs
from zsim.engine.simulate import Outcome, resimulate_with_hosts
from zsim.plan.columns import op_columns
from zsim.plan.ops import Plan, Program
from zsim.specs.cluster.cluster import HostDevice
from zsim.specs.cluster.host_speeds import host_speeds
from zsim.specs.cluster.spreads import End, scale_host_speeds
from zsim.specs.cluster.table import Evidence
from zsim.units import format_seconds
from zsim.validated.validation import format_range

_KNOWN: tuple[Evidence, ...] = ("measured", "calibrated")
_LEAST = 0.01  # of the step; hosts that move it by less do not bind it
_NEAR = 0.9  # of the step; the slowest host that issues for less is taken not to bind it


_Issue = tuple[str | None, int, int]  # overhead, events and launches of an op


@dataclass(frozen=True, slots=True)
class HostRange:
    """Seconds of the step with hosts at both ends of how far hosts of one kind differ."""

    fast_seconds: float
    """With hosts at the fast end."""
    slow_seconds: float
    """With hosts at the slow end."""
    factors: tuple[float, float]
    """The factors of both ends on a host's time."""
    issue_seconds: float
    """Seconds in which the busiest rank's host issues the step's work."""
    cpu: str
    """The processors that the cluster names."""

    def note(self, bound_fraction: float) -> str:
        """The host that is taken, and what depends on it. `bound_fraction` is the fraction of the step that
        waits for it.
        """
        low, high = self.factors
        issued, step = (
            format_seconds(self.issue_seconds),
            format_range((self.fast_seconds, self.slow_seconds)),
        )
        return (
            f"the host ({self.cpu}, not measured) issues the step's work in {issued}, and "
            f"{bound_fraction:.0%} of the step waits for it; hosts of one kind of machine take {low:g} to "
            f"{high:g} times as long, and the step then {step}, which the range counts (cluster.host.cpu "
            "names another CPU, `zsim calibrate` reads measurements of one)"
        )


def host_range(outcome: Outcome) -> HostRange | None:
    """The step with its hosts at both ends of their range of speeds.

    None where the step waits for them at neither end, where their speed was measured, on a CPU's ranks, and
    with jitter or other jobs.

    A host that has issued everything before the GPU is done, and would have at its slow end, is not simulated
    again. When it is slower by a factor f, it holds the step up by at most (f - 1) H, where H is the seconds
    in which it issues.
    """
    job = outcome.job
    hosts = job.cluster.hosts
    is_known = all(host.evidence in _KNOWN or not host.seconds_per_launch for host in hosts)
    if is_known or outcome.jitter_run is not None or outcome.concurrent_jobs:
        return None
    speeds, step = host_speeds().spread, outcome.trace.step_seconds
    issued = max(issue_seconds(outcome.plan, host, shipped_host_costs()) for host in hosts)
    if speeds.slow * issued < _NEAR * step:
        return None
    slow = max(step, _seconds_at(outcome, "slow"))
    if slow < (1 + _LEAST) * step:
        return None
    fast = min(step, _seconds_at(outcome, "fast"))
    cpus = " + ".join(dict.fromkeys(host.cpu or "a CPU without a name" for host in hosts))
    return HostRange(fast, slow, (speeds.fast, speeds.slow), issued, cpus)


def issue_seconds(plan: Plan, host: HostDevice, costs: HostCosts) -> float:
    """Seconds in which the busiest rank's host issues a step's ops."""
    return max(
        sum(number * host_seconds(*issue, host, costs) for issue, number in program.memoize(_issues).items())
        for program in plan.programs
    )


def _issues(program: Program) -> Counter[_Issue]:
    columns = program.memoize(op_columns)
    return Counter(zip(columns.overhead, columns.events, columns.launches, strict=True))


def _seconds_at(outcome: Outcome, end: End) -> float:
    return resimulate_with_hosts(outcome, scale_host_speeds(outcome.job.cluster, end))
