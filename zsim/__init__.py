"""Simulate a training step of a real model on a real cluster: ZeRO 0-3, DDP, FSDP, FSDP2 and HSDP.

    experiment = zsim.load_experiment("experiment.toml")
    result = zsim.simulate(experiment)
    result.report.to_dict(), result.trace.to_frame()

Names are imported at their first use, so that `import zsim` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zsim import frameworks
from zsim.version import __version__

if TYPE_CHECKING:
    from zsim.api import Result, make_plan
    from zsim.comparison.compare import compare
    from zsim.comparison.comparison import Comparison
    from zsim.errors import InputError, NotSimulatedError, StuckError, ZsimError
    from zsim.fluid.pool import max_min_fair_rates, simulate_flows
    from zsim.frameworks import *  # noqa: F403
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

_NAMES = {
    **frameworks.NAMES,
    "zsim.api": "make_plan Result",
    "zsim.comparison.compare": "compare",
    "zsim.comparison.comparison": "Comparison",
    "zsim.errors": "InputError NotSimulatedError StuckError ZsimError",
    "zsim.fluid.pool": "max_min_fair_rates simulate_flows",
    "zsim.specs.capture.capture": "capture",
    "zsim.specs.experiment.load": "load_experiment",
    "zsim.specs.experiment.tables": "Experiment",
    "zsim.specs.experiment.typed_tables": "Cost Faults Jitter Parallelism Run Trainer Training",
    "zsim.study.memory": "memory MemoryResult MemoryVariants",
    "zsim.study.needs": "needs NeedsResult",
    "zsim.study.rent.rent": "rent RentResult",
    "zsim.study.replay.replay": "Replay replay",
    "zsim.study.scaling.result": "ScalingResult",
    "zsim.study.scaling.scaling": "scaling",
    "zsim.study.search": "simulate",
    "zsim.study.sensitivity.result": "sensitivity SensitivityResult",
    "zsim.study.sweep.sweep": "sweep SweepResult",
    "zsim.study.topologies.result": "bench_collectives BenchResult compare_topologies TopologiesResult",
    "zsim.study.tune.result": "TuneResult",
    "zsim.study.tune.tune": "tune",
    "zsim.study.whole_runs": "RunResult simulate_run",
    "zsim.trace.readers.read": "read_trace",
    "zsim.workflows.rl.result": "RlResult simulate_rl",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
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
__all__ += frameworks.__all__


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'zsim' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
