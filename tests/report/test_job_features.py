from __future__ import annotations

from typing import Any

import pytest

from zsim.report.job_features import job_features, network_fabric, node_fabric
from zsim.specs.cluster.files import load_cluster
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.strategy.registry import STRATEGIES as KINDS
from zsim.study.model_presets import strategies
from zsim.validated.features import Features


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
