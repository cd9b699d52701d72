from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.validated.conftest import FEATURES
from zsim.validated.extrapolation import extrapolations
from zsim.validated.features import Features
from zsim.validated.runs import ValidatedRun


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
        (
            {"binding": "the network"},
            "no validated run of FSDP on several nodes waits as much for the network",
        ),
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
