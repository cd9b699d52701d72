"""Where the time of one run went: every second of the clock in one bin."""

from __future__ import annotations

from dataclasses import dataclass, field

BINS = (
    "checkpoints", "evaluation", "detection", "restart", "recomputation", "waiting", "planned", "degraded",
)  # fmt: skip


@dataclass(slots=True)
class Span:
    """A part of a run's clock, for its timeline."""

    start_seconds: float
    end_seconds: float
    bin: str
    cause: str
    steps: float
    """Steps that are done at its end."""


@dataclass(slots=True)
class PhaseTime:
    """Seconds of a phase on the clock."""

    elapsed: float
    worked: float
    """Ideal seconds of its steps, also of those that were run again."""


@dataclass(slots=True)
class RunLedger:
    """Seconds of one run by bin, and lost seconds by cause of failure, on as many nodes as the first phase
    has.
    """

    useful: float = 0.0
    """Ideal seconds of the steps that were kept."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BINS, 0.0))
    by_cause: dict[str, float] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    num_saves: int = 0
    num_restarts: int = 0
    num_scratch: int = 0
    steps: float = 0.0
    elapsed: float = 0.0
    is_finished: bool = False
    phases: list[PhaseTime] = field(default_factory=list)
    """The phases that have ended."""
    node_share: float = 1.0
    """Nodes of the phase under way, over the first one's."""
    spans: list[Span] | None = None
    """The timeline, if it is kept."""

    def add(self, bin: str, seconds: float, cause: str = "") -> None:
        """Book lost seconds. Negative ones take back what turns out to be of another bin."""
        self.seconds[bin] += seconds
        if cause:
            self.by_cause[cause] = self.by_cause.get(cause, 0.0) + seconds * self.node_share

    def count(self, cause: str) -> None:
        """Book a failure."""
        self.failures[cause] = self.failures.get(cause, 0) + 1

    def end_phase(self, now: float) -> None:
        """Book the time of the phase that ends now."""
        worked = self.useful + self.seconds["recomputation"]
        earlier_phases = self.phases
        elapsed = now - sum(phase.elapsed for phase in earlier_phases)
        self.phases.append(PhaseTime(elapsed, worked - sum(phase.worked for phase in earlier_phases)))

    def mark(self, start: float, end: float, bin: str, cause: str, steps: float) -> None:
        """Add to the timeline."""
        if self.spans is not None and end > start:
            self.spans.append(Span(start, end, bin, cause, steps))

    @property
    def num_failures(self) -> int:
        return sum(self.failures.values())
