"""A step by hosts of different speed."""

from __future__ import annotations

from zsim.dataclass import dataclass
from zsim.units import format_seconds
from zsim.validated.validation import range_words


@dataclass(frozen=True, slots=True)
class HostRange:
    """Seconds of the step with hosts at the `fast` and at the `slow` end of how far hosts of one kind differ,
    whose factors on a host's time are `factors`. `issue_seconds`: in which the busiest rank's host issues the
    step's work; `cpu`: the processors that the cluster names."""

    fast_seconds: float
    slow_seconds: float
    factors: tuple[float, float]
    issue_seconds: float
    cpu: str

    def times(self, factor: float) -> HostRange:
        """The range of a step that is `factor` times as long."""
        return HostRange(
            self.fast_seconds * factor,
            self.slow_seconds * factor,
            self.factors,
            self.issue_seconds * factor,
            self.cpu,
        )

    def note(self, bound_fraction: float) -> str:
        """The host that is taken, and what hangs on it; `bound_fraction`: of the step, waiting for it."""
        low, high = self.factors
        issued, step = format_seconds(self.issue_seconds), range_words((self.fast_seconds, self.slow_seconds))
        return (
            f"the host ({self.cpu}, not measured) issues the step's work in {issued}, and "
            f"{bound_fraction:.0%} of the step waits for it; hosts of one kind of machine take {low:g} to "
            f"{high:g} times as long, and the step then {step}, which the range counts (cluster.host.cpu "
            "names another CPU, `zsim calibrate` reads measurements of one)"
        )
