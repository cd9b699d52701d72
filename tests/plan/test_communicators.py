"""What NCCL's communicators take, by their GPUs and by what is sent over them."""

from __future__ import annotations

from typing import Any

import pytest

import zsim
from zsim.plan.make import make_plan
from zsim.plan.memory.capacity import framework_bytes_range, framework_memory, workspaces_bytes
from zsim.specs.experiment.resolve import resolve

MIB, GIB = 2**20, 2**30
NODE = round(0.73 * GIB)  # 8 GPUs that NVSwitch joins


def held(cluster: str, nodes: int, model: str = "llama-3.2-1b", **tables: Any) -> tuple[int, int, int]:
    """The least of a rank's communicators, what they are taken to be, and the most."""
    training = {"sequence_length": 128, **tables.pop("training", {})}
    strategy = tables.pop("strategy", {"kind": "megatron"})
    job = resolve(
        zsim.Experiment(
            model=model, cluster=cluster, nodes=nodes, training=training, strategy=strategy, **tables
        )
    )
    plan = make_plan(job)
    libraries = job.cluster.framework_memory.context + workspaces_bytes(job, job.cluster.gpu)
    taken = framework_memory(job, plan).bytes
    least, most = framework_bytes_range(job, plan)
    return least - libraries, taken - libraries, most - libraries


@pytest.mark.parametrize(
    ("cluster", "nodes", "tensor", "expected"),
    [
        ("dgx-h100", 1, 1, NODE),  # data alone, 8 GPUs
        ("dgx-h100", 1, 2, 2 * 544_000_000 + 2 * NODE),  # tensor and model pairs; 4 replicas, all
        ("dgx-h100", 4, 8, 3 * NODE + 124 * MIB),  # data ranks: one GPU of each of 4 nodes
        ("dgx-a100-80gb", 4, 8, 3 * NODE + 62 * MIB),
        ("dgx-2", 1, 1, 373 * MIB),  # 12 channels of 31 MiB
        ("rtx-4090-x8", 1, 1, 124 * MIB),  # over PCIe 4 channels at most
    ],
)
def test_a_communicator_has_the_channels_that_its_links_can_feed(
    cluster: str, nodes: int, tensor: int, expected: int
) -> None:
    assert held(cluster, nodes, parallelism={"tensor": tensor})[1] == pytest.approx(expected, abs=3)


def test_nodes_of_one_nvlink_domain_are_no_network() -> None:
    """GB200 NVL72: the two trays' data pairs are joined by NVLink, as the four GPUs of a tray are."""
    assert held("gb200-nvl72", 2, parallelism={"tensor": 4})[1] == pytest.approx(
        544_000_000 + 3 * NODE, abs=3
    )


def test_the_first_exchange_of_all_to_all_connects_every_pair() -> None:
    """8 experts' ranks of a node of H100: 7 peers of 469 MB, 3.28 GB as NVIDIA/nccl issue 1685 has it."""
    experts = {"expert": 8, "dispatcher": "all-to-all"}
    gathered = {"expert": 8, "dispatcher": "all-gather"}
    there, here = (
        held("dgx-h100", 1, "olmoe-1b-7b", parallelism=parallelism)[1] for parallelism in (gathered, experts)
    )
    assert here - there == 7 * 469_000_000


def test_sources_disagree_by_what_is_connected() -> None:
    """NCCL from 2.22 on connects a ring alone: 24 channels of 12 MiB; older ones all at once, 0.73 GiB."""
    least, taken, most = held("dgx-h100", 1)
    assert least == 288 * MIB
    assert taken == most == pytest.approx(NODE, abs=2)


@pytest.mark.parametrize(("missing", "is_told"), [(-(10**8), False), (10**8, True), (10**9, False)])
def test_a_verdict_that_the_communicators_decide_says_so(missing: int, is_told: bool) -> None:
    """0.5 GB lie between what sources have for one communicator of a node."""
    changes: dict[str, Any] = {"model": "llama-3.2-1b", "nodes": 1, "strategy": {"kind": "fsdp2"}}
    peak = zsim.simulate(zsim.Experiment(cluster="dgx-h100", **changes)).report.peaks["gpu"].total
    made_up = {"source": "made up for this test", "evidence": "assumed"}
    memory = {"capacity": f"{round((peak - missing) * 1.05)} B", **made_up}
    gpu = {"extends": "h100-sxm-80gb", "name": "small", "memory": memory}
    cluster = {"extends": "dgx-h100", "name": "small", "gpu": gpu}
    report = zsim.simulate(zsim.Experiment(cluster=cluster, **changes)).report
    assert report.fits == (missing < 0)
    assert any("with the least the tensors would fit" in note for note in report.notes) == is_told


@pytest.mark.parametrize(
    ("cluster", "strategy", "expected"),
    [
        ("dgx-h100", {"kind": "ddp"}, 2 * 2**25),
        ("dgx-h100", {"kind": "deepspeed", "stage": 3}, 2 * 2**25),
        ("dgx-a100-80gb", {"kind": "fsdp2"}, 2 * 8_519_680),
        ("dgx-h100", {"kind": "megatron"}, 0),
        ("mi300x-x8", {"kind": "fsdp2"}, 0),
    ],
)
def test_every_framework_has_cublas_s_workspaces(
    cluster: str, strategy: dict[str, Any], expected: int
) -> None:
    """Two handles: 32 MiB each on Hopper, 8,519,680 bytes before, as pytorch/pytorch issue 95668 has it on an
    A10G. Megatron's are in its plan, three with Transformer Engine's own. AMD's GPUs have no cuBLAS."""
    training = {"sequence_length": 128}
    job = resolve(
        zsim.Experiment(model="gpt2", cluster=cluster, nodes=1, training=training, strategy=strategy)
    )
    assert workspaces_bytes(job, job.cluster.gpu) == expected
    held = [memory.bytes for memory in make_plan(job).resident if memory.bytes == 2**25]
    assert len(held) == (3 if strategy["kind"] == "megatron" else 0)
