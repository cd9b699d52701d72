"""The starting point of a search: an experiment with everything that the search may set left open."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from zsim.specs.experiment.job import Job
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.programs import Program
from zsim.specs.experiment.tables import Experiment


@dataclass(frozen=True)
class Base:
    """One kind of strategy on one cluster."""

    data: Mapping[str, Any]
    """File-shaped, with its batch sizes in [training]."""
    job: Job
    sequences: int
    """Sequences per replica and step, micro-batch x accumulation steps. Searches keep this number."""

    @property
    def kind(self) -> str:
        return self.job.kind

    @property
    def program(self) -> Program | None:
        """The program whose configuration file the experiment comes from, or None for an experiment in zsim's
        format.
        """
        program: Program | None = self.data.get("program")
        return program

    @property
    def world_size(self) -> int:
        return self.job.world_size

    @property
    def batch_sequences(self) -> int:
        """Sequences of all replicas in a step."""
        return self.sequences * self.job.data_parallel_size

    @cached_property
    def key(self) -> str:
        """The content of `data` as text."""
        return json.dumps(self.data, sort_keys=True, default=str)

    @cached_property
    def largest_shard_numel(self) -> int:
        """Elements of the largest parameter's shard, which NVMe buffers must hold."""
        largest = max(parameter.numel for _, parameter in self.job.model.named_parameters())
        return -(-largest // self.world_size)

    def experiment(self, overrides: Mapping[str, Any]) -> Experiment:
        """The experiment with `overrides`. Raises InputError where they contradict the rest."""
        return build_experiment(dict(self.data), overrides, origin="tune")
