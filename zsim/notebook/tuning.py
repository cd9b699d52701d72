"""`zsim.tune`: the best configuration that fits."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from zsim.report.views.displayable import Displayable, Figures
from zsim.study.experiment_source import ExperimentSource, experiment_of
from zsim.study.progress import Counts
from zsim.study.tune import tune as search
from zsim.study.tune.page import pareto_figure, steps_figure, tuning_page
from zsim.study.tune.text import label_of, subject, tuning_files, tuning_lines, tuning_to_dict, verdict
from zsim.study.tune.tune import Tuning


class TuneResult(Displayable, Tuning):
    """The best configurations in order, the given one, and the changes that lead from it to the best.

    `save(folder)` writes each as files for its framework (`best/`, `2/`, ...) and tune.html.
    """

    def records(self) -> Sequence[Mapping[str, Any]]:
        """The best configurations with their changes (`overrides`) and results, best first."""
        best: list[dict[str, Any]] = self.to_dict()["best"]
        return best

    def headline(self) -> str:
        return f"{subject(self)}. {verdict(self)}"

    def columns(self) -> Sequence[str]:
        return ("label", "gpus", "step_seconds", "tokens_per_second_per_gpu", "mfu_fraction",
                "gpu_peak_bytes", "limit")  # fmt: skip

    def lines(self) -> Iterable[str]:
        return tuning_lines(self)

    def to_dict(self) -> dict[str, Any]:
        """The object that `zsim tune --json` writes."""
        return tuning_to_dict(self)

    def plots(self) -> Figures:
        steps = {"steps": lambda: steps_figure(self)} if self.steps else {}
        return {"pareto": lambda: pareto_figure(self), **steps}

    def pages(self) -> Mapping[str, str]:
        return {**tuning_files(self), "tune.html": tuning_page(self)}

    @property
    def label(self) -> str:
        """The best configuration in words."""
        return label_of(self.best[0])


def tune(
    experiment: ExperimentSource = None,
    goal: str = "fastest",
    *,
    overrides: Mapping[str, Any] | None = None,
    kinds: Sequence[str] | None = None,
    keep: Sequence[str] = (),
    quantised: bool = False,
    parallelism: bool = False,
    simulations: int | None = None,
    headroom: float = 0.0,
    top: int = 5,
    jobs: int | None = None,
    cache: str | Path | None = None,
) -> TuneResult:
    """Find the best configuration that fits, as `zsim tune` does. The global batch stays.

    `experiment` is a file, a `zsim.Experiment`, a dict, or None for the README's example. `goal` is fastest,
    cheapest, fewest-days (of `[run]`), smallest-cluster, largest-model, largest-batch or longest-sequence.
    `kinds` are the strategies to look at, e.g. ["deepspeed", "fsdp2"], by default the experiment's. `keep` is
    what stays as it is, e.g. ["micro-batch"], or ["all"]. With `quantised` ZeRO++'s int8 gathers and int4
    reductions are tried too. With `parallelism` tensor, pipeline and context degrees are tried too, with at
    most `simulations` simulated. `headroom` is the fraction of GPU memory to leave free. `top` is how many
    are kept in `best`. `cache` is a folder of simulated points.

        found = zsim.tune("experiment.toml", kinds=["deepspeed", "fsdp2"], top=3)
        found.best[0].seconds, found.to_frame(), found.figure("pareto")
        found.save("tuned")                      # tuned/best/... for DeepSpeed or torchtitan

    Raises InputError where nothing fits.
    """
    resolved_experiment = experiment_of(experiment, overrides)
    with Counts("checked", "simulated") as progress:
        tuned = search.tune(
            resolved_experiment, goal, kinds=kinds or (), keep=keep, allows_quantised=quantised,
            searches_parallelism=parallelism, budget=simulations, headroom=headroom, count=top,
            jobs=jobs or os.cpu_count() or 1, cache=None if cache is None else Path(cache),
            on_done=progress.update,
        )  # fmt: skip
    return TuneResult(**{field.name: getattr(tuned, field.name) for field in fields(tuned)})
