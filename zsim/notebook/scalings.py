"""`zsim.scaling`: one experiment on a growing number of GPUs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from zsim.errors import InputError, did_you_mean
from zsim.report.views.displayable import Displayable, Figures
from zsim.study.experiment_source import ExperimentSource, experiment_of
from zsim.study.scaling import page
from zsim.study.scaling.page import MODES, scaling_lines
from zsim.study.scaling.scaling import Mode, Scaling, parse_counts, run_lines, run_scaling
from zsim.study.sweep.sweep import points_folder


class ScalingResult(Displayable, Scaling):
    """The experiment on each number of GPUs. `knees()` says where efficiency bends, and why."""

    def records(self) -> Sequence[Mapping[str, Any]]:
        """One row per number of GPUs."""
        scales: list[dict[str, Any]] = self.to_dict()["scales"]
        return scales

    def headline(self) -> str:
        return f"{self.title} | {MODES[self.mode]}"

    def columns(self) -> Sequence[str]:
        failed = ["error"] if any(scale.error for scale in self.points) else []
        return ["gpus", "step_seconds", "tokens_per_second", "efficiency_fraction", "mfu_fraction", "fits",
                "gpu_peak_bytes", *failed]  # fmt: skip

    def lines(self) -> Iterator[str]:
        yield from scaling_lines(self)
        yield from run_lines(self)

    def to_dict(self) -> dict[str, Any]:
        """The content of scaling.json."""
        return page.scaling_dict(self)

    def plots(self) -> Figures:
        return {
            "efficiency": lambda: page.efficiency(self),
            "throughput": lambda: page.throughput(self),
            "causes": lambda: page.causes(self),
            "memory": lambda: page.memory(self),
        }

    def pages(self) -> Mapping[str, str]:
        content = json.dumps(self.to_dict(), indent=1) + "\n"
        return {"scaling.html": page.scaling_page(self), "scaling.json": content}


def scaling(
    experiment: ExperimentSource = None,
    gpus: str | Iterable[int] = "8..1024",
    *,
    mode: str = "weak",
    overrides: Mapping[str, Any] | None = None,
    global_batch: int | None = None,
    grow: str | None = None,
    jobs: int | None = None,
    cache: str | Path | None = None,
) -> ScalingResult:
    """Simulate an experiment on a growing number of GPUs, as `zsim scaling` does.

    `gpus` is "8..1024" (doubling), "8..4096:4", or numbers. `mode` "weak" keeps the batch of a GPU, "strong"
    that of all GPUs (`global_batch` sequences, else the experiment's), and "fill" takes the largest
    micro-batch that fits. `grow` is "tensor", "pipeline" or "context", the degree that grows in place of the
    replicas. `cache` is a folder of simulated points.

        found = zsim.scaling("experiment.toml", [8, 16, 32, 64])
        found.figure("efficiency"), [knee.cause for knee in found.knees()]

    Raises InputError where no count can be simulated.
    """
    if mode not in MODES:
        raise InputError(
            f"scaling: mode: found {mode!r}, expected one of {', '.join(MODES)}{did_you_mean(mode, MODES)}"
        )
    parsed_mode: Mode = "fill" if mode == "fill" else "strong" if mode == "strong" else "weak"
    text = gpus if isinstance(gpus, str) else ",".join(str(count) for count in gpus)
    resolved_experiment, counts = experiment_of(experiment, overrides), parse_counts(text)
    with points_folder(None if cache is None else Path(cache)) as folder:
        scaling_study = run_scaling(
            resolved_experiment, counts, parsed_mode, folder, global_batch=global_batch, grow=grow,
            jobs=jobs or os.cpu_count() or 1,
        )  # fmt: skip
    return ScalingResult(
        **{field.name: getattr(scaling_study, field.name) for field in fields(scaling_study)}
    )
