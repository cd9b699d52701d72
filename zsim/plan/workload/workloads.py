"""Cache of the workloads of a study's plans."""

from __future__ import annotations

from collections.abc import Sequence

from zsim.plan.workload.workload import Workload, make_workloads
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.training import TrainingConfig

_MOST = 8  # models under a training


class Workloads:
    """Workloads that plans have in common. Those of equal models under equal trainings, whatever shards them,
    are made once, and with them what `Workload.memoize` caches. The most recently used are kept.
    """

    def __init__(self) -> None:
        self._cached: list[
            tuple[TrainingConfig, Sequence[ModelSpec], list[Workload]]
        ] = []  # last used at the end

    def of(self, stages: Sequence[ModelSpec], training: TrainingConfig) -> list[Workload]:
        """The workloads of the stages of a model, as of `make_workloads`."""
        for index, (cached_training, models, workloads) in enumerate(self._cached):
            if cached_training == training and models == stages:
                self._cached.append(self._cached.pop(index))
                return workloads
        workloads = make_workloads(stages, training)
        self._cached = [*self._cached, (training, stages, workloads)][-_MOST:]
        return workloads
