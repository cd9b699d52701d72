"""Moments in the report: which one breaks a job, what is noted, and the verdict that counts them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from zsim.plan.moments import BUILDING, FIRST_FORWARD, FIRST_UPDATE, GATHERED_SAVE, SAVING, JobMoment
from zsim.report.fit import breaking_sentence, moment_notes
from zsim.report.job_features import job_features, network_fabric, node_fabric
from zsim.report.memory import OutOfMemory
from zsim.report.report import Report
from zsim.specs.cluster.files import load_cluster
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.strategy.registry import STRATEGIES as KINDS
from zsim.study.presets import strategies
from zsim.validated.features import Features

GB = 10**9
LIMITS = {"gpu": 80 * GB, "host": 1000 * GB, "nvme": None}


def moment(name: str, gpu: int | None = None, host: int | None = None, *, certain: bool = True) -> JobMoment:
    return JobMoment(name, gpu, host, "because", "a source", certain)


def with_moments(make: Callable[..., Report], *moments: JobMoment) -> Report:
    return replace(make(), moments=moments, capacity_bytes=LIMITS)


def test_the_first_moment_without_room_is_the_one_that_breaks(
    make_step_report: Callable[..., Report],
) -> None:
    roomy, building = moment(FIRST_FORWARD, 70 * GB), moment(BUILDING, 90 * GB)
    said = breaking_sentence(with_moments(make_step_report, building, roomy))
    assert said.endswith("before the first step, while the optimizer's states are made: 90.00 GB on a GPU")
    said = breaking_sentence(with_moments(make_step_report, roomy, moment(FIRST_UPDATE, 95 * GB)))
    assert said.startswith(
        "It runs out of memory in the first update, while the optimizer's states are made: 95.00 GB"
    )
    said = breaking_sentence(with_moments(make_step_report, moment(SAVING, None, 1200 * GB)))
    assert said == "It breaks when saving: 1.20 TB on a node's host"


def test_what_only_some_scripts_do_breaks_nothing(make_step_report: Callable[..., Report]) -> None:
    some = moment(SAVING, None, 1200 * GB, certain=False)
    found = with_moments(make_step_report, some)
    assert breaking_sentence(found) == ""
    assert found.verdict.word == "fits"
    (note,) = moment_notes(found)
    assert note == (
        "a script that also does this runs out of memory: saving, 1.20 TB on a node's host (`zsim memory` "
        "says why)"
    )


def test_the_verdict_is_that_of_the_moment_that_needs_most(make_step_report: Callable[..., Report]) -> None:
    found = with_moments(make_step_report, moment(GATHERED_SAVE, 20 * GB, 3000 * GB))
    assert found.load == 3.0
    assert found.verdict.word == "does not fit"
    assert found.fits, "all tensors of the step have room"


def test_the_exact_part_is_of_the_memory_that_gives_the_load(make_step_report: Callable[..., Report]) -> None:
    """States of the step are no part of a moment's bytes, nor those on the GPU of what the host lacks."""
    peak = make_step_report().peaks["gpu"]
    states = replace(
        peak, total=88 * GB, at_total={"parameters": 16 * GB, "gradients": 24 * GB, "buffers": 48 * GB}
    )
    full = replace(with_moments(make_step_report), peaks={"gpu": states})
    assert full.load_and_exact == (1.1, 0.5)
    over = OutOfMemory("blocks.2 forward", "gpu", 0, 0.1, GB, 8 * GB, 80 * GB)
    assert replace(full, out_of_memory=over).load_and_exact == (1.1, 0.5)
    assert replace(full, moments=(moment(SAVING, None, 1200 * GB),)).load_and_exact == (1.2, 0.0)
    host = OutOfMemory("start-up", "host", 0, 0.0, 200 * GB, 200 * GB, 1000 * GB)
    assert replace(full, out_of_memory=host).load_and_exact == (1.2, 0.0)


def test_a_job_that_breaks_in_a_later_step_says_what_the_first_one_needed(
    make_step_report: Callable[..., Report],
) -> None:
    first = moment(FIRST_FORWARD, 60 * GB), moment(FIRST_UPDATE, 50 * GB)
    over = OutOfMemory("blocks.2 forward", "gpu", 0, 0.1, GB, 2 * GB, 80 * GB)
    found = replace(with_moments(make_step_report, *first), out_of_memory=over)
    said = breaking_sentence(found)
    assert said.startswith(
        "It runs out of memory in the second step: the first one's forward and backward need 60.00 GB"
    )
    assert said.endswith("its update 50.00 GB")
    assert breaking_sentence(with_moments(make_step_report, *first)) == ""


def test_a_moment_that_needs_half_of_a_tier_and_more_than_the_step_is_noted(
    make_step_report: Callable[..., Report],
) -> None:
    """The step needs 17.75 GB of the GPU's 80."""
    notes = list(moment_notes(with_moments(make_step_report, moment(SAVING, 41 * GB))))
    assert notes == ["saving, 41.00 GB on a GPU: because"]
    assert not list(moment_notes(with_moments(make_step_report, moment(SAVING, 39 * GB))))
    (note,) = moment_notes(with_moments(make_step_report, moment(SAVING, 81 * GB)))
    assert "more than it has" in note


def test_every_moment_is_in_the_json(make_step_report: Callable[..., Report]) -> None:
    (row,) = with_moments(make_step_report, moment(SAVING, None, 5)).to_dict()["moments"]
    assert row == {
        "name": "saving", "gpu_bytes": None, "host_bytes": 5, "cause": "because", "source": "a source",
        "is_certain": True,
    }  # fmt: skip


# --  ------------------------------------------------------------------------------------------------------


def features(seconds: dict[str, float] | None = None, retries: float = 0, **changes: Any) -> Features:
    experiment = Experiment(**{"model": "gpt2", "cluster": "dgx-h100", "nodes": 2, **changes})
    return job_features(resolve(experiment), seconds or {"compute": 1.0}, 1.0, retries)


@pytest.mark.parametrize(
    ("changes", "framework", "strategy"),
    [
        ({"strategy": {"kind": "fsdp1"}}, "FSDP", "FSDP1"),
        ({"strategy": {"kind": "fsdp2", "replicate": 2}}, "FSDP", "HSDP"),
        ({"strategy": {"kind": "fsdp2", "cpu_offload": True}}, "FSDP", "FSDP2 offloaded"),
        ({"strategy": {"kind": "ddp"}}, "DDP", "DDP"),
        ({"strategy": {"stage": 3}}, "DeepSpeed", "ZeRO-3"),
        ({"strategy": {"stage": 3}, "nodes": None, "gpus": 1}, "DDP", "one GPU"),
    ],
)
def test_what_shards_is_named(changes: dict[str, Any], framework: str, strategy: str) -> None:
    found = features(**changes)
    assert (found.framework, found.strategy) == (framework, strategy)


def test_what_binds_the_step_is_its_largest_wait() -> None:
    assert features({"compute": 0.8, "exposed_communication": 0.2}).binding == "the network"
    assert features({"compute": 0.8, "exposed_communication": 0.2}, retries=1).binding == "the allocator"


def test_a_job_on_one_node_has_its_links_and_one_on_several_its_network() -> None:
    assert features(nodes=1).fabric == "NVSwitch"
    assert features().fabric == "InfiniBand"
    assert features(nodes=None, gpus=1).fabric == ""


@pytest.mark.parametrize(
    ("cluster", "node", "network"),
    [
        ("dgx-a100-80gb", "NVSwitch", "InfiniBand"),
        ("aws-p5", "NVSwitch", "EFA"),
        ("roce-h100", "NVSwitch", "RoCE"),
        ("mi300x-x8", "a mesh of links between GPUs under rccl", "RoCE"),
        ("rtx-4090-x8", "PCIe between GPUs", "Ethernet"),
        ("gb200-nvl72", "NVSwitch", "an NVLink domain of several nodes"),
    ],
)
def test_presets_say_what_joins_their_gpus(cluster: str, node: str, network: str) -> None:
    found = load_cluster(cluster)
    assert (node_fabric(found), network_fabric(found)) == (node, network)


def test_gloo_joins_the_ranks_of_a_host_by_no_switch_of_a_gpus() -> None:
    assert node_fabric(load_cluster("cpu-gloo")) == "the host's loopback under gloo"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_strategy_is_among_those_that_may_lack_a_run(kind: str) -> None:
    stage = {"stage": 3} if kind in ("reference", "deepspeed") else {}
    assert features(strategy={"kind": kind, **stage}).strategy in strategies()
