"""A report on the hand-made sharded step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from zsim.report.report import JobFacts, MachineUse, Report, StepWork, make_report, traced_step
from zsim.report.traffic import SentRow, TrafficRow
from zsim.trace.trace import SimulationStats, Trace

EXPERIMENT = {
    "model": "llama-3-70b",
    "training": {"sequence_length": 8192, "compile": False},
    "cluster": {
        "name": "dgx-h100",
        "node_link": {
            "source": "the vendor's sheet, https://example.org/sheet.pdf, page 3",
            "evidence": "data sheet",
            "bandwidth": 450e9,
            "latency": 5e-7,
            "efficiency": 0.81,
        },
    },
}


def reported(trace: Trace, simulation: SimulationStats, **values: Any) -> Report:
    """The report of `trace`; `values` are those of the job, of the machine, or of the report."""
    facts = JobFacts(**{name: values.pop(name) for name in JobFacts.__slots__ if name in values})
    use = MachineUse(**{name: values.pop(name) for name in MachineUse.__slots__ if name in values})
    names = ("step_seconds_without_overlap", "offload_seconds_range", "pipeline")
    simulated = {name: values.pop(name) for name in names if name in values}
    return replace(make_report(traced_step(trace), facts, simulation, use, **simulated), **values)


@pytest.fixture
def build_report() -> Callable[..., Report]:
    return reported


@pytest.fixture
def make_step_report(make_sharded_step: Callable[..., Trace]) -> Callable[..., Report]:
    """4 blocks over 16 ranks; the trace's peak: 2 of framework, 0.25 + 1.5 of shards, 12 of activations and
    2 of gathered parameters: 17.75 GB."""

    def build(trace: Trace | None = None, **changes: Any) -> Report:
        values = {
            "zsim_version": "0.1.0",
            "experiment": EXPERIMENT,
            "work": StepWork(8192, 6e12, 8e12, 989e12, "6N per token"),
            "capacity_bytes": {"gpu": 80 * 10**9, "host": None, "nvme": None},
            "evidence": {"compute": "calibrated", "network": "data sheet"},
            "labels": {"model": "llama-3-70b", "cluster": "2 x dgx-h100", "strategy": "FSDP2"},
            "traffic": [TrafficRow("InfiniBand", 4.1e9, 0.82), TrafficRow("NVLink", 3e10, None)],
            "sent": [SentRow("backward", "all_gather", "world", 16, 3e9, 4e8)],
            **changes,
        }
        stats = SimulationStats(0.05, 1000, 1, 16)
        return reported(make_sharded_step() if trace is None else trace, stats, **values)

    return build
