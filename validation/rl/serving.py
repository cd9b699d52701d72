"""One engine alone, under requests that arrive in time, or all at once."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
import simpy

from zsim.cost.inference.iteration import IterationPricer
from zsim.workflows.rollout.limits import EngineLimits
from zsim.workflows.rollout.replica import Replica
from zsim.workflows.rollout.requests import EngineLog, SampleRequest


@dataclass(frozen=True, eq=False)
class ServingResult:
    """Requests that an engine has answered."""

    requests: tuple[SampleRequest, ...]
    log: EngineLog
    seconds: float
    """Seconds until the last token."""

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second."""
        return self.log.generated_tokens / self.seconds

    @property
    def steady_tokens_per_second(self) -> float:
        """Generated tokens a second of requests that arrive in time: those of the answers that end after a
        fifth of all requests have come, and before the last comes.
        """
        starts = sorted(request.start_seconds or 0.0 for request in self.requests)
        begin, end = starts[len(starts) // 5], starts[-1]
        tokens = sum(
            request.response_tokens for request in self.requests if begin < request.end_seconds <= end
        )
        return tokens / (end - begin) if end > begin else self.tokens_per_second

    @property
    def seconds_per_token(self) -> float:
        """Mean over requests of the time between two tokens, after the first."""
        times = [
            (request.end_seconds - request.first_seconds) / (request.response_tokens - 1)
            for request in self.requests
            if request.response_tokens > 1
        ]
        return float(np.mean(times)) if times else 0.0


def serve(
    pricer: IterationPricer,
    limits: EngineLimits,
    requests: Sequence[SampleRequest],
    *,
    arrivals: Sequence[float] | None = None,
    concurrency: int | None = None,
) -> ServingResult:
    """Let an engine answer `requests`.

    They arrive at the seconds of `arrivals`, or the next one when fewer than `concurrency` are unanswered, or
    all at once.
    """
    env = simpy.Environment()
    waiting = iter(requests)

    def submit_next(_: SampleRequest | None = None) -> None:
        request = next(waiting, None)
        if request is not None:
            replica.submit(request)

    def arrive(times: Sequence[float]) -> Generator[simpy.Event, None, None]:
        for time in times:
            yield env.timeout(time - env.now)
            submit_next()

    is_closed = arrivals is None and concurrency is not None
    replica = Replica(env, pricer, limits, submit_next if is_closed else lambda request: None)
    replica.start()
    if arrivals is not None:
        env.process(arrive(arrivals))
    else:
        for _ in range(len(requests) if concurrency is None else min(concurrency, len(requests))):
            submit_next()
    env.run()
    return ServingResult(tuple(requests), replica.log, max(request.end_seconds for request in requests))
