"""ZeRO-Infinity's table of the largest models on DGX-2 nodes (SC'21 slides, memory_tables.csv mem-0093 to
mem-0104; 3D parallelism, mem-0096, is not simulated): each size fits, and what is clearly larger does not.

Shapes are not published. Widths are chosen so that single tensors fit; sequences of 1,024 tokens,
micro-batches of one, full checkpointing, in host memory for ZeRO-Infinity. Models of 8T and more have tiled
linear layers, as the paper's memory-centric tiling, sequences of 512 tokens, and a vocabulary of 8,192, so
that the embedding is not their largest tensor.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from zsim import Experiment
from zsim.errors import InputError, NotSimulatedError
from zsim.plan.make import make_plan
from zsim.plan.memory.capacity import node_capacity_bytes, node_peak_bytes, peak_bytes, usable_bytes
from zsim.plan.ops import Plan
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve

SLOW = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("ZSIM_SLOW"), reason="a minute or two; set ZSIM_SLOW=1"),
]
CPU = {"device": "cpu"}
NVME = {"device": "nvme", "nvme_path": "/nvme"}
DATA_PARALLEL = {"stage": 0}
ZERO_OFFLOAD = {"stage": 2, "offload_optimizer": CPU, "reduce_bucket_size": 2 * 10**8}
ZERO_3 = {"stage": 3}
INFINITY_CPU = {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}
INFINITY_NVME = {
    "stage": 3, "offload_optimizer": NVME, "sub_group_size": 10**6, "stage3_max_reuse_distance": 0,
    "offload_param": {**NVME, "max_in_cpu": 0, "buffer_count": 12, "buffer_size": 2 * 10**8},
    "stage3_prefetch_bucket_size": 0,
}  # fmt: skip


def job_of(
    zero: dict[str, Any], width: int, layers: int, nodes: int, *, vocabulary: int = 50257, length: int = 1024
) -> Job:
    model = {
        "model_type": "gpt2", "n_embd": width, "n_layer": layers, "n_head": width // 64, "n_positions": 1024,
        "vocab_size": vocabulary,
    }  # fmt: skip
    is_infinity = "offload_param" in zero
    config = {
        "fp16": {"enabled": True}, "zero_optimization": zero,
        "activation_checkpointing": {"cpu_checkpointing": is_infinity},
    }  # fmt: skip
    strategy: dict[str, Any] = {"kind": "deepspeed", "config": config}
    if width > 65536:
        strategy["tile_numel"] = 2 * 10**9
    training = {"sequence_length": length, "micro_batch_size": 1, "activation_checkpointing": "full"}
    return resolve(
        Experiment(model=model, cluster="dgx-2", nodes=nodes, training=training, strategy=strategy)
    )


def paper_plan(job: Job) -> Plan:
    """ZeRO-Infinity as published: reduced gradients go to their fp32 home at once."""
    strategy = job.experiment.strategy.model_copy(update={"host_gradient_sums": False})
    return make_plan(resolve(job.experiment.model_copy(update={"strategy": strategy})))


def does_not_fit(job: Job, plan: Plan) -> list[str]:
    """The tiers that are too small."""
    limits = node_capacity_bytes(job, plan)
    too_small = [
        device for device, limit in limits.items() if node_peak_bytes(job, plan, device) > (limit or 0)
    ]
    return (["gpu"] if peak_bytes(job, plan) > usable_bytes(job.cluster) else []) + [
        str(d) for d in too_small
    ]


@pytest.mark.parametrize(
    ("row", "zero", "fitting", "too_large", "tier"),
    [
        ("mem-0093: 1.4B", DATA_PARALLEL, (1536, 48), (1792, 48), "gpu"),
        ("mem-0094: 13B", ZERO_OFFLOAD, (5120, 40), (6144, 44), "gpu"),
        ("mem-0095: 20B", ZERO_3, (8192, 25), (8192, 34), "gpu"),
        ("mem-0097: 70B", INFINITY_CPU, (8192, 87), (8192, 100), "host"),
    ],
)
def test_the_largest_model_of_each_placement_on_one_node(
    row: str, zero: dict[str, Any], fitting: tuple[int, int], too_large: tuple[int, int], tier: str
) -> None:
    """1.44B and 1.94B; 13.1B and 20.3B; 20.6B and 27.8B; 70.5B and 81.0B parameters."""
    job = job_of(zero, *fitting, 1)
    assert does_not_fit(job, make_plan(job)) == []
    job = job_of(zero, *too_large, 1)
    assert does_not_fit(job, make_plan(job)) == [tier]


def test_a_trillion_parameters_on_one_node_with_nvme() -> None:
    """mem-0098, mem-0099: 1.008T take 18 bytes each of 30.7 TB; 2.015T do not fit on the drives."""
    job = job_of(INFINITY_NVME, 25600, 128, 1)
    plan = paper_plan(job)
    assert does_not_fit(job, plan) == []
    nvme = node_peak_bytes(job, plan, "nvme")
    assert nvme == pytest.approx(18 * job.model.numel, rel=0.01)
    job = job_of(INFINITY_NVME, 25600, 256, 1)
    assert does_not_fit(job, paper_plan(job)) == ["nvme"]


def test_deepspeed_itself_needs_2_bytes_more_per_parameter_of_host_memory() -> None:
    """The accumulation buffer that later releases keep in pinned memory is 2 TB for a trillion parameters,
    more than the node's 1.5 TB, so DeepSpeed 0.19.8 does not fit what the paper's version did."""
    job = job_of(INFINITY_NVME, 25600, 128, 1)
    now, then = make_plan(job), paper_plan(job)
    assert does_not_fit(job, now) == ["host"]
    more = node_peak_bytes(job, now, "host") - node_peak_bytes(job, then, "host")
    assert more == pytest.approx(2 * job.model.numel, rel=1e-3)


@pytest.mark.parametrize(
    ("row", "width", "layers", "nodes"),
    [
        ("mem-0100: 8T", 131072, 39, 8),
        pytest.param("mem-0101: 16T", 131072, 78, 16, marks=SLOW),
        pytest.param("mem-0102: 32T", 131072, 156, 32, marks=SLOW),
        pytest.param("mem-0103: 64T", 131072, 311, 64, marks=SLOW),
        pytest.param("mem-0104: 128T", 163840, 398, 128, marks=SLOW),
    ],
)
def test_a_trillion_parameters_per_node_on_many_nodes(row: str, width: int, layers: int, nodes: int) -> None:
    """The size fits on so many nodes; half of them do not have the drives for it."""
    job = job_of(INFINITY_NVME, width, layers, nodes, vocabulary=8192, length=512)
    plan = paper_plan(job)
    assert job.model.numel >= nodes * 10**12
    assert does_not_fit(job, plan) == []
    half = node_peak_bytes(job, plan, "nvme") * 2
    assert half > (node_capacity_bytes(job, plan)["nvme"] or 0)


@pytest.mark.parametrize(
    ("zero", "steps", "message"),
    [
        (ZERO_3, 1, "for stage 3 with offload_optimizer"),
        (ZERO_OFFLOAD, 1, "for stage 3 with offload_optimizer"),
        (INFINITY_CPU, 2, "gradient_accumulation_steps 2, which are summed there"),
    ],
)
def test_sums_cannot_be_left_out_where_there_are_none_or_they_are_needed(
    zero: dict[str, Any], steps: int, message: str
) -> None:
    experiment = job_of(zero, 1024, 2, 1).experiment
    changes = {
        "strategy": experiment.strategy.model_copy(update={"host_gradient_sums": False}),
        "training": experiment.training.model_copy(update={"gradient_accumulation_steps": steps}),
    }
    with pytest.raises(InputError, match=message):
        resolve(experiment.model_copy(update=changes))


def test_tiles_that_make_too_many_parameters_are_refused() -> None:
    """Tiles of 8 weights make 38,916 parameters of each of Qwen3-8B's 36 blocks, and a plan of hours. Tiles
    of 700,000 make 2 x 24 + 2 x 6 + 3 x 84 and two norms of each of Llama-3-8B's 32, which take seconds.
    """

    def experiment(model: str, numel: int) -> Experiment:
        strategy = {"kind": "deepspeed", "stage": 3, "tile_numel": numel}
        return Experiment(model=model, cluster="dgx-h100", gpus=2, strategy=strategy)

    with pytest.raises(NotSimulatedError, match="1,400,976 parameters; zsim simulates at most 20,000"):
        resolve(experiment("qwen3-8b", 8))
    blocks = resolve(experiment("llama-3-8b", 700_000)).model.blocks
    assert sum(len(module.parameters) for block in blocks for module in block.modules) == 32 * 314
