"""Should I believe this? What a step rests on, and what to measure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import exp, log
from typing import Any

import pytest

from tests.browser import Page, text_of
from zsim.errors import InputError
from zsim.report.report import Report
from zsim.report.trust import (
    TITLE,
    evidence_items,
    fraction_by_grade,
    near_table,
    propose_measurements,
    trust_of,
)
from zsim.report.views.html.report import html_report
from zsim.trace.trace import Trace
from zsim.validated.features import Features
from zsim.validated.runs import shipped_estimates
from zsim.validated.validation import validation_of


def known(grade: str) -> dict[str, str]:
    return {"evidence": grade, "source": f"a {grade} source"}


CLUSTER: dict[str, Any] = {
    "name": "ours",
    "gpus_per_node": 8,
    "gpu": {
        "peak": known("data sheet"), "gemm": known("calibrated"), "attention": known("calibrated"),
        "memory": known("measured"), "memory_bound": known("measured"), "interference": known("assumed"),
    },
    "nic": known("data sheet"), "collectives": known("calibrated"), "network": known("assumed"),
}  # fmt: skip
SECONDS = {"compute": 6.0, "hbm": 1.0, "interference": 0.05, "network": 2.0, "spine": 0.5, "others": 0.45}
JOB = Features("FSDP", "FSDP2", "h100-sxm-80gb", 16, 128, "InfiniBand", "kernels", 8 * 10**9)


@pytest.fixture
def report(make_step_report: Callable[..., Report]) -> Report:
    """A step of 10 s, its critical path in `SECONDS`."""
    return replace(
        make_step_report(notes=["extrapolated: 60% of the work in matrix products", "another note"]),
        step_seconds=10.0,
        critical_path_seconds=SECONDS,
        experiment={"cluster": CLUSTER, "training": {"sequence_length": 8192, "precision": "bf16"}},
        validation=validation_of(JOB),
    )


def test_each_part_of_the_step_has_the_grade_of_its_weakest_numbers(report: Report) -> None:
    """A tier that is not a part of the node (a spine) is the network's."""
    found = {one.cause: (one.evidence, one.weakest) for one in evidence_items(report)}
    assert found == {
        "compute": ("data sheet", ("gpu.peak",)),
        "network": ("data sheet", ("nic",)),
        "hbm": ("measured", ("gpu.memory", "gpu.memory_bound")),
        "spine": ("assumed", ("network",)),
        "others": ("follows", ()),
        "interference": ("assumed", ("gpu.interference",)),
    }
    first = evidence_items(report)[0]
    assert (first.step_fraction, first.source) == (0.6, "a data sheet source")
    assert first.words == "data sheet: peak; calibrated: gemm, attention"


def test_the_grades_add_up_to_the_critical_path(report: Report) -> None:
    assert fraction_by_grade(evidence_items(report)) == pytest.approx(
        {"measured": 0.1, "data sheet": 0.8, "assumed": 0.055, "follows": 0.045}
    )


def test_what_is_not_measured_is_to_be_measured_the_largest_part_first(report: Report) -> None:
    """Kernels (60 %) before the network (20 + 5 %); the 0.5 % of interference is left out, HBM is measured.
    Links are measured on 2 of the 16 nodes: 16 ranks."""
    kernels, network = propose_measurements(evidence_items(report), "ours", 16, 8)
    assert (kernels.tables, kernels.step_fraction) == (("gpu.peak",), 0.6)
    assert kernels.calibrate == "zsim calibrate microbench.json --base ours --name ours --out ours.toml"
    assert (network.tables, network.step_fraction) == (("nic", "network"), 0.25)
    assert network.command.startswith("mpirun -np 16 -N 8 ./build/all_gather_perf")
    assert "all_gather.txt --base ours --ranks 16 --nodes 2" in network.calibrate
    (alone,) = propose_measurements(evidence_items(report)[1:], "ours", 1, 8)
    assert "--ranks 8 --nodes 1" in alone.calibrate


def test_a_lower_power_limit_that_servers_have_is_named_unless_the_limit_is_stated(report: Report) -> None:
    """700 W over 500 W to the power of 0.5: products take 1.18 times as long."""
    power = {"maximum": 700.0, "lower_limits": (600.0, 500.0), "exponent": 0.5}
    gpu = {**CLUSTER["gpu"], "name": "chip", "power": power}

    def limits(**changes: object) -> list[str]:
        cluster = {**CLUSTER, "gpu": {**gpu, **changes}}
        found = trust_of(replace(report, experiment={**report.experiment, "cluster": cluster})).uncounted
        return [sentence for sentence in found if "power limit" in sentence]

    (said,) = limits()
    assert "some servers run chip at 500 W, where products take 1.18 times as long" in said
    assert limits(power_limit=700.0) == []
    assert limits(power={**power, "maximum": 500.0}) == []


def test_a_known_step_needs_no_measurement(report: Report) -> None:
    hbm = [one for one in evidence_items(report) if one.cause == "hbm"]
    assert propose_measurements(hbm, "ours", 16, 8) == ()


def test_the_text_answers_in_order_and_within_80_columns(report: Report) -> None:
    found = trust_of(report)
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 80
    places = [
        lines.index(next(line for line in lines if line.startswith(words)))
        for words in (
            TITLE,
            "step  10.000 s",
            "Nearest",
            "Why",
            "What is extrapolated",
            "What the step",
            "What to",
        )
    ]
    assert places == sorted(places)
    assert "- extrapolated: 60% of the work in matrix products" in lines
    assert not any("another note" in line for line in lines)


def test_runs_beside_the_interval_are_in_its_measure(report: Report) -> None:
    """A step predicted as 14.5 times the measured one is 0.07 of the prediction, not 1351 % off."""
    found = trust_of(report)
    far = replace(found.nearest[0], run=replace(found.nearest[0].run, error=-log(14.51)))
    assert near_table([far]).rows[0][1] == "0.07"
    said = str(replace(found, nearest=(far,)))
    assert "Nearest validated runs (measured step over predicted)" in said
    assert "1351" not in said
    (row,) = replace(found, nearest=(far,)).records()
    assert row["measured_over_predicted"] == pytest.approx(1 / 14.51)
    assert row["error_fraction"] == pytest.approx(13.51)


def test_a_cheaper_step_to_measure_has_a_quarter_of_the_nodes(report: Report) -> None:
    """On one node half the sequence; the bounds are the shipped ones of [ratios]."""
    several = trust_of(report)
    ratios = shipped_estimates()["ratios"]
    assert several.smaller == "nodes=4"
    assert several.smaller_bound == pytest.approx(exp(ratios["GPUs"]) - 1)
    assert report.validation is not None
    alone = replace(report, validation=validation_of(replace(JOB, nodes=1, gpus=8)))
    found = trust_of(alone)
    assert found.smaller == "training.sequence_length=4096"
    assert found.smaller_bound == pytest.approx(exp(ratios["sequence length"]) - 1)


@pytest.mark.parametrize(
    ("model_ranks", "parallelism", "smaller"),
    [
        (8, {"tensor": 8, "pipeline": 1}, "nodes=4"),
        (48, {"tensor": 8, "pipeline": 6}, "nodes=6"),
        (128, {"tensor": 8, "pipeline": 16}, "training.sequence_length=4096"),
        (4, {"tensor": 1, "pipeline": 4, "expert": 16, "expert_tensor": 1}, "nodes=8"),
    ],
)
def test_the_smaller_step_holds_whole_replicas_and_groups_of_experts(
    report: Report, model_ranks: int, parallelism: dict[str, int], smaller: str
) -> None:
    """Of 16 nodes of 8: replicas of 48 ranks need 6 nodes; 4 stages of 16 ranks of experts need 8."""
    known = validation_of(replace(JOB, model_ranks=model_ranks))
    assert trust_of(replace(report, validation=known, parallelism=parallelism)).smaller == smaller


@pytest.mark.parametrize(
    ("low", "high", "begin"),
    [(0.95, 1.1, "Yes, closely"), (0.9, 1.3, "Roughly"), (0.6, 1.8, "As an order of size")],
)
def test_the_verdict_follows_the_width(report: Report, low: float, high: float, begin: str) -> None:
    assert report.validation is not None
    found = trust_of(replace(report, validation=replace(report.validation, low=low, high=high)))
    assert found.verdict.startswith(begin)
    assert f"at {low - 1:+.0%} to {high - 1:+.0%} of what is predicted" in found.verdict


def test_the_page_has_the_section_and_a_link_to_it(
    report: Report, make_sharded_step: Callable[..., Trace]
) -> None:
    html = html_report(report, make_sharded_step())
    page, text = Page(html), text_of(Page(html))
    assert '<a href="#believe">' in html
    assert f"{TITLE} {trust_of(report).verdict}" in text
    assert "compute 60.0 % data sheet data sheet: peak; calibrated: gemm, attention" in text
    assert "plot-errors" in page.figures
    assert page.fetched == []


def test_in_a_notebook_it_shows_the_nearest_runs_and_a_figure(report: Report) -> None:
    found = trust_of(report)
    html = found._repr_html_()
    assert TITLE in html
    assert str(found.records()[0]["row_id"]) in html
    assert found.figures == ("errors",)
    assert len(found.to_frame()) == len(found.nearest)


def test_a_recordings_step_is_nothing_to_believe(make_step_report: Callable[..., Report]) -> None:
    with pytest.raises(InputError, match="not a prediction"):
        trust_of(make_step_report())
