"""The start of a job: processes, communicators, compilation, the first step."""

from __future__ import annotations

from zsim.api import Result
from zsim.goodput.checkpoint import Startup
from zsim.goodput.checkpoints.rates import StartingRates, starting_rates
from zsim.specs.experiment.job import Job


def startup_of(job: Job, result: Result) -> Startup:
    """The start of a job whose steady step is `result`, on machines that have its image."""
    rates = starting_rates()
    seconds = result.report.step_seconds
    compiled = rates.compile if job.training.compile else 0.0
    first = seconds * (rates.first_steps - 1)
    return Startup(rates.process, communicator_seconds(job.world_size, rates), compiled, first)


def communicator_seconds(ranks: int, rates: StartingRates) -> float:
    """Seconds of setting up the communicators of so many ranks: a power of their number."""
    if ranks == 1:
        return 0.0
    growth = (ranks / rates.communicator_ranks) ** rates.communicator_exponent
    return float(max(rates.communicator_least, rates.communicator_seconds * growth))
