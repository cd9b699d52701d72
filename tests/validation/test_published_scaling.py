"""Published scaling curves: the same direction for the same reason, and as their page says."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path

import pytest

from zsim.specs.experiment.load import load_experiment
from zsim.study.scaling.result import ScalingResult
from zsim.study.scaling.scaling import run_scaling

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "validation" / "scaling"
PUBLISHED = list(csv.DictReader((FOLDER / "published.csv").open()))
DOC = (ROOT / "validation" / "scaling" / "README.md").read_text()


def scaled(curve: str, counts: list[int], folder: Path) -> ScalingResult:
    options = next(row["options"] for row in PUBLISHED if row["curve"] == curve).split()
    batch = int(options[options.index("--global-batch") + 1]) if "--global-batch" in options else None
    mode = "fill" if "--fill" in options else "strong"
    experiment = load_experiment(FOLDER / f"{curve}.toml")
    return run_scaling(experiment, counts, mode, folder, global_batch=batch, is_quiet=True)  # type: ignore[arg-type]


def published(curve: str) -> dict[int, float]:
    """Relative throughput per GPU by count."""
    rows = [row for row in PUBLISHED if row["curve"] == curve]
    return {int(row["gpus"]): float(row["relative_throughput_per_gpu"]) for row in rows}


def written(curve: str) -> dict[int, tuple[float, float, int]]:
    """The page's (published, simulated, micro-batch) by count, NaN where nothing is published; a
    curve's table follows its command."""
    table = DOC.split(f"validation/scaling/{curve}.toml")[1].split("\n\n")[1]
    cells = [re.findall(r"[^|]+", line) for line in table.splitlines()[2:]]
    return {
        int(row[0]): (float(row[1].replace("-", "nan")), float(row[2]), int(row[3]))
        for row in cells
        if row[2].strip() != "-"
    }


@pytest.mark.parametrize("curve", sorted({row["curve"] for row in PUBLISHED}))
def test_the_page_has_the_published_curve(curve: str) -> None:
    page = {gpus: row[0] for gpus, row in written(curve).items() if not math.isnan(row[0])}
    assert len(page) >= 2
    for gpus, relative in page.items():
        assert relative == pytest.approx(published(curve)[gpus], abs=0.006)


@pytest.mark.parametrize(
    ("curve", "counts", "cause"),
    [
        ("zero2-13b", [80, 256], "network"),
        ("mpt-30b", [8, 16], "interference"),
        ("zero3-offload-200b", [64, 128], "cpu"),
        ("mpt-350m", [32, 64], "compute"),
        ("zero3-175b", [768, 1536], "latency"),
    ],
)
def test_a_published_curve_bends_the_same_way_for_its_reason(
    curve: str, counts: list[int], cause: str, tmp_path: Path
) -> None:
    scaling = scaled(curve, counts, tmp_path)
    (bend,) = scaling.changes()
    measured = published(curve)
    # ZeRO's curve rises from 64 to 256 GPUs for 60B, from 80 to 256 for the 13B that stands in for it.
    first, last = (64, 256) if curve == "zero2-13b" else counts
    assert (measured[last] > measured[first]) == (bend.after > bend.before)
    assert bend.cause == cause
    page = written(curve)
    assert bend.after / bend.before == pytest.approx(page[counts[1]][1] / page[counts[0]][1], abs=0.03)
    assert [scale.micro_batch_size for scale in scaling.runs] == [page[count][2] for count in counts]
