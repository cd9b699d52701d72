"""Simulate a training step of a real model on a real cluster: ZeRO 0-3, DDP, FSDP, FSDP2 and HSDP.

    experiment = zsim.load_experiment("experiment.toml")
    result = zsim.simulate(experiment)
    result.report.to_dict(), result.trace.to_frame()

Names are imported at their first use, so that `import zsim` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zsim.frameworks import public
from zsim.version import __version__

if TYPE_CHECKING:
    from zsim.api import Result, make_plan
    from zsim.comparison.compare import compare
    from zsim.comparison.comparison import Comparison
    from zsim.errors import InputError, NotSimulatedError, StuckError, ZsimError
    from zsim.fluid.pool import max_min_fair_rates, simulate_flows
    from zsim.frameworks.public import *  # noqa: F403
    from zsim.specs.capture.capture import capture
    from zsim.specs.experiment.load import load_experiment
    from zsim.specs.experiment.tables import Experiment
    from zsim.specs.experiment.typed_tables import (
        Cost,
        Faults,
        Jitter,
        Parallelism,
        Run,
        Trainer,
        Training,
    )
    from zsim.study.memory import MemoryResult, MemoryVariants, memory
    from zsim.study.needs import NeedsResult, needs
    from zsim.study.rent.rent import RentResult, rent
    from zsim.study.replay.replay import Replay, replay
    from zsim.study.scaling.result import ScalingResult
    from zsim.study.scaling.scaling import scaling
    from zsim.study.search import simulate
    from zsim.study.sensitivity.result import SensitivityResult, sensitivity
    from zsim.study.sweep.sweep import SweepResult, sweep
    from zsim.study.topologies.result import (
        BenchResult,
        TopologiesResult,
        bench_collectives,
        compare_topologies,
    )
    from zsim.study.tune.result import TuneResult
    from zsim.study.tune.tune import tune
    from zsim.study.whole_runs import RunResult, simulate_run
    from zsim.trace.readers.read import read_trace
    from zsim.workflows.rl.result import RlResult, simulate_rl

_MODULE_OF = {
    "Result": "zsim.api",
    "make_plan": "zsim.api",
    "simulate": "zsim.study.search",
    "max_min_fair_rates": "zsim.fluid.pool",
    "Comparison": "zsim.comparison.comparison",
    "compare": "zsim.comparison.compare",
    "InputError": "zsim.errors",
    "NotSimulatedError": "zsim.errors",
    "StuckError": "zsim.errors",
    "ZsimError": "zsim.errors",
    "simulate_flows": "zsim.fluid.pool",
    "sweep": "zsim.study.sweep.sweep",
    "SweepResult": "zsim.study.sweep.sweep",
    "tune": "zsim.study.tune.tune",
    "TuneResult": "zsim.study.tune.result",
    "rent": "zsim.study.rent.rent",
    "RentResult": "zsim.study.rent.rent",
    "scaling": "zsim.study.scaling.scaling",
    "ScalingResult": "zsim.study.scaling.result",
    "sensitivity": "zsim.study.sensitivity.result",
    "SensitivityResult": "zsim.study.sensitivity.result",
    "needs": "zsim.study.needs",
    "NeedsResult": "zsim.study.needs",
    "memory": "zsim.study.memory",
    "MemoryResult": "zsim.study.memory",
    "MemoryVariants": "zsim.study.memory",
    "compare_topologies": "zsim.study.topologies.result",
    "TopologiesResult": "zsim.study.topologies.result",
    "bench_collectives": "zsim.study.topologies.result",
    "BenchResult": "zsim.study.topologies.result",
    "simulate_run": "zsim.study.whole_runs",
    "simulate_rl": "zsim.workflows.rl.result",
    "RlResult": "zsim.workflows.rl.result",
    "RunResult": "zsim.study.whole_runs",
    "Training": "zsim.specs.experiment.typed_tables",
    "Parallelism": "zsim.specs.experiment.typed_tables",
    "Trainer": "zsim.specs.experiment.typed_tables",
    "Faults": "zsim.specs.experiment.typed_tables",
    "Jitter": "zsim.specs.experiment.typed_tables",
    "Cost": "zsim.specs.experiment.typed_tables",
    "Run": "zsim.specs.experiment.typed_tables",
    "Experiment": "zsim.specs.experiment.tables",
    "load_experiment": "zsim.specs.experiment.load",
    "Replay": "zsim.study.replay.replay",
    "capture": "zsim.specs.capture.capture",
    "replay": "zsim.study.replay.replay",
    "read_trace": "zsim.trace.readers.read",
    **public.MODULE_OF,
}
__all__ = [
    "BenchResult",
    "Comparison",
    "Cost",
    "Experiment",
    "Faults",
    "InputError",
    "Jitter",
    "MemoryResult",
    "MemoryVariants",
    "NeedsResult",
    "NotSimulatedError",
    "Parallelism",
    "RentResult",
    "Replay",
    "Result",
    "RlResult",
    "Run",
    "RunResult",
    "ScalingResult",
    "SensitivityResult",
    "StuckError",
    "SweepResult",
    "TopologiesResult",
    "Trainer",
    "Training",
    "TuneResult",
    "ZsimError",
    "__version__",
    "bench_collectives",
    "capture",
    "compare",
    "compare_topologies",
    "load_experiment",
    "make_plan",
    "max_min_fair_rates",
    "memory",
    "needs",
    "read_trace",
    "rent",
    "replay",
    "scaling",
    "sensitivity",
    "simulate",
    "simulate_flows",
    "simulate_rl",
    "simulate_run",
    "sweep",
    "tune",
]
__all__ += public.__all__


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'zsim' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
