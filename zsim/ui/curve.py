"""The scaling curve of the page, computed one point at a time, so that the page never waits for all
points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from zsim.dataclass import dataclass
from zsim.report.views.html.figure import Figure
from zsim.specs.experiment.tables import Experiment
from zsim.study.scaling.page import efficiency, throughput
from zsim.study.scaling.scaling import Mode, run_scaling
from zsim.study.scaling.text import sentences


@dataclass(frozen=True)
class Curve:
    """The curve so far, as the figures and sentences of the scaling study."""

    figures: Mapping[str, Figure]
    words: str


def curve(experiment: Experiment, counts: Sequence[int], mode: Mode, folder: Path) -> Curve:
    """The curve over `counts`. Its points are kept in `folder`. Raises as `run_scaling` does."""
    scaling = run_scaling(experiment, counts, mode, folder, is_quiet=True)
    figures = {"efficiency": efficiency(scaling), "throughput": throughput(scaling)}
    failure_texts = [f"{scale.gpus:,} GPUs: {scale.error}." for scale in scaling.points if scale.error]
    return Curve(figures, " ".join([*sentences(scaling), *failure_texts]))
