"""The page of a step and its trace: what the step waits for, and both sides over time."""

from __future__ import annotations

from functools import cache

import pytest

from tests.workflows.test_loop import experiment, simulator
from zsim.workflows.rl.page import _waterfall, step_page, step_trace
from zsim.workflows.rl.result import RlResult, simulate_rl


@cache
def asynchronous() -> RlResult:
    return simulate_rl(experiment(placement="async", partial_rollout=True), simulator())


def test_the_waterfall_ends_where_the_step_does() -> None:
    bars = _waterfall(asynchronous()).to_plotly_json()["data"]
    ends = [bar["base"][0] + bar["x"][0] for bar in bars]
    assert [bar["base"][0] for bar in bars[1:]] == pytest.approx(ends[:-1])
    assert ends[-1] == pytest.approx(asynchronous().step.seconds, rel=0.02)


def test_the_trace_has_the_trainers_phases_and_every_replicas_sequences() -> None:
    events = step_trace(asynchronous())["traceEvents"]
    phases = [event for event in events if event["ph"] == "X"]
    assert {"rollout", "training", "weight sync"} <= {event["name"] for event in phases}
    starts, ends = zip(*((event["ts"], event["ts"] + event["dur"]) for event in phases), strict=True)
    assert all(end <= start + 1 for end, start in zip(ends, starts[1:], strict=False))
    counters = [event for event in events if event["ph"] == "C"]
    assert {event["tid"] for event in counters} == set(range(len(asynchronous().step.logs)))
    assert max(event["args"]["running"] for event in counters) > 0


def test_the_page_names_every_phase_and_what_its_memory_is_for() -> None:
    text = step_page(asynchronous())
    for word in ("old logprobs", "weight sync", "kv cache", "rollout weights", "optimizer states"):
        assert word in text
