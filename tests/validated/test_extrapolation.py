from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.validated.conftest import FEATURES
from validation.published.widening import estimate_widening, extrapolation_scores
from zsim.validated.extrapolation import RESPECTS, extrapolations, widening_factor
from zsim.validated.features import Features
from zsim.validated.runs import ValidatedRun

WIDENING = dict.fromkeys(RESPECTS, 1.5)


def sentences(job: Features, runs: Sequence[ValidatedRun]) -> list[str]:
    return [one.sentence for one in extrapolations(job, runs)]


def test_a_job_like_a_run_extrapolates_nothing(make_run: Callable[..., ValidatedRun]) -> None:
    assert sentences(FEATURES, [make_run("one", 0.0)]) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"gpu": "mi300x-192gb"}, "GPU mi300x-192gb without a validated run"),
        ({"fabric": "EFA"}, "EFA without a validated run"),
        ({"strategy": "HSDP"}, "HSDP without a validated run"),
        ({"is_mixture": True}, "no validated run of FSDP of a mixture of experts"),
        ({"gpus": 64, "nodes": 8}, "more GPUs than any validated run of FSDP (16)"),
        ({"parameters": 7 * 10**10}, "more parameters than any validated run of FSDP (8e9)"),
        ({"binding": "the network"}, "no validated run of FSDP on several nodes is bound by the network"),
    ],
)
def test_each_respect_is_named_by_itself(
    make_run: Callable[..., ValidatedRun], changes: dict[str, Any], sentence: str
) -> None:
    assert sentences(replace(FEATURES, **changes), [make_run("one", 0.0)]) == [sentence]


def test_a_framework_without_a_run_on_several_nodes_is_named(make_run: Callable[..., ValidatedRun]) -> None:
    runs = [make_run("one", 0.0, nodes=1, gpus=16)]
    assert "no validated run of FSDP on several nodes" in sentences(FEATURES, runs)


def test_a_fabric_that_is_not_known_is_not_judged(make_run: Callable[..., ValidatedRun]) -> None:
    assert sentences(replace(FEATURES, fabric=""), [make_run("one", 0.0)]) == []


def test_excesses_add_in_squares_and_doublings_as_well(make_run: Callable[..., ValidatedRun]) -> None:
    """Two respects that stretch by 1.5 each: 1 + sqrt(0.25 + 0.25); four times as many GPUs: 1 + sqrt(2 x
    0.25)."""
    runs = [make_run("one", 0.0)]
    both = extrapolations(replace(FEATURES, gpu="b200", fabric="EFA"), runs)
    more = extrapolations(replace(FEATURES, gpus=64), runs)
    assert widening_factor([], WIDENING) == 1.0
    assert widening_factor(both, WIDENING) == pytest.approx(1 + 0.5**0.5)
    assert widening_factor(more, WIDENING) == pytest.approx(1 + 0.5**0.5)


def test_each_further_doubling_and_respect_stretches_more(make_run: Callable[..., ValidatedRun]) -> None:
    runs = [make_run("one", 0.0)]
    jobs = [replace(FEATURES, gpus=count) for count in (16, 17, 32, 64, 1024)]
    jobs.append(replace(FEATURES, gpus=1024, gpu="b200"))
    stretches = [widening_factor(extrapolations(job, runs), WIDENING) for job in jobs]
    assert stretches == sorted(stretches)
    assert len(set(stretches)) == len(stretches)


def test_widening_is_what_left_out_groups_need(make_run: Callable[..., ValidatedRun]) -> None:
    """Two sources on each of three chips err by +-1 %, two on a fourth by +-5 %. Without its own runs the
    fourth is judged by +-1 %, five times too narrow; each of the others by the worst of the rest, +-5 %, a
    fifth of which it errs. The fourth's two runs are the highest quarter of the scores."""
    runs = []
    for chip, error in (("a", 0.01), ("b", 0.01), ("c", 0.01), ("d", 0.05)):
        runs += [make_run(f"{chip}{n}", error * (-1) ** n, gpu=chip) for n in range(2)]
    assert set(extrapolation_scores(runs, RESPECTS["gpu"])) == set(runs)
    assert estimate_widening(runs)["gpu"] == pytest.approx(4.5, abs=0.5)
    assert all(factor >= 1.0 for factor in estimate_widening(runs).values())


def test_a_source_is_never_among_those_that_judge_it(make_run: Callable[..., ValidatedRun]) -> None:
    """The source errs by 50 %, the others by 1 %: judged by them it is far outside; with itself among them
    it would be at the end of its interval."""
    runs = [
        *(make_run(f"s{n}", 0.01 * (-1) ** n) for n in range(6)),
        *(make_run("bad", 0.5) for _ in range(50)),
    ]
    scores = extrapolation_scores(runs)
    assert min(score for run, score in scores.items() if run.source == "bad") > 5


def test_a_framework_without_a_run_is_named_and_all_that_no_run_at_all_has(
    make_run: Callable[..., ValidatedRun],
) -> None:
    job = replace(FEATURES, framework="the reference engine", gpus=64, parameters=7 * 10**10)
    assert sentences(job, [make_run("one", 0.0)]) == [
        "no validated run of the reference engine",
        "more GPUs than any validated run (16)",
        "more parameters than any validated run (8e9)",
    ]
    assert "no validated run on several nodes" in sentences(job, [make_run("one", 0.0, nodes=1)])


def test_a_gpu_that_only_another_framework_ran_on_is_named(make_run: Callable[..., ValidatedRun]) -> None:
    runs = [make_run("one", 0.0), make_run("two", 0.0, framework="DDP", gpu="b200-sxm-180gb")]
    assert sentences(replace(FEATURES, gpu="b200-sxm-180gb"), runs) == [
        "GPU b200-sxm-180gb without a validated run of FSDP"
    ]
