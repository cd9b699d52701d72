"""Every stage and every place trains as DDP does: 20 steps on 1, 2, 3 and 4 ranks."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install zsim[validate]")

from tests.validation.live_deepspeed import need_live_deepspeed  # noqa: E402
from validation.backends import Optimization, Strategy  # noqa: E402
from validation.launch import run  # noqa: E402
from validation.training import TrainCase, TrainResult  # noqa: E402

pytestmark = pytest.mark.torch

# two runs at once must not share files
NVME = Path(tempfile.gettempdir()) / f"zsim-validation-nvme-{os.getpid()}"
PLAIN = Optimization(learning_rate=3e-3)
ACCUMULATED = Optimization(learning_rate=3e-3, accumulation_steps=2)
CLIPPED = Optimization(learning_rate=3e-3, gradient_clipping=0.5)
SPARED = Optimization(learning_rate=3e-3, no_decay=("unused", "norm"))
DDP = Strategy("ddp")


def engine(**options: Any) -> Strategy:
    return Strategy("engine", options)


STAGES = {f"stage {stage}": engine(stage=stage) for stage in range(4)}
PLACES = {
    "stage 1, states in host memory": engine(stage=1, optimizer_place="host"),
    "stage 3, states and parameters in host memory": engine(
        stage=3, optimizer_place="host", parameter_place="host"
    ),
    "stage 2, states on NVMe": engine(stage=2, optimizer_place="nvme", nvme_folder=NVME),
    "stage 3, states and parameters on NVMe": engine(
        stage=3, optimizer_place="nvme", parameter_place="nvme", nvme_folder=NVME, prefetch=2
    ),
}
WAYS = {
    "stage 0 in buckets": engine(stage=0, bucket_bytes=10**6),
    "stage 2 in buckets": engine(stage=2, bucket_bytes=10**5),
    "stage 3 in one bucket": engine(stage=3, bucket_bytes=10**9),
    "stage 3, gloo's own reduce-scatter": engine(stage=3, reduce_scatter="native"),
    "stage 3, everything resharded, poisoned": engine(stage=3, keep_gathered=False, poison=True),
    "stage 3 without prefetch": engine(stage=3, prefetch=0, max_reductions_in_flight=1),
    "stage 3, prefetch 2": engine(stage=3, prefetch=2, keep_gathered=False),
}
BF16 = {
    f"stage {stage} in bf16, states on the {place}": engine(
        stage=stage, compute_dtype=torch.bfloat16, optimizer_place=place
    )
    for stage, place in ((0, "device"), (1, "device"), (2, "device"), (3, "device"), (3, "host"))
}
FP16 = engine(stage=3, compute_dtype=torch.float16, loss_scale="dynamic", scale_window=5)
OTHERS = {
    "FSDP2 resharding": Strategy("fsdp2"),
    "FSDP2 resharding the root too": Strategy("fsdp2", {"reshard_ends": True}),
    "FSDP2 not resharding": Strategy("fsdp2", {"reshard_after_forward": False}),
    "FSDP2 with CPU offload": Strategy("fsdp2", {"cpu_offload": True}),
    "FSDP2, all-to-all": Strategy("fsdp2", {"all_to_all": True}),
    "ZeroRedundancyOptimizer": Strategy("zero_redundancy"),
}


def deepspeed(stage: int, **zero: Any) -> Strategy:
    return Strategy("deepspeed", {"config": {"zero_optimization": {"stage": stage, **zero}}})


IN_HOST_MEMORY = {"device": "cpu"}
DEEPSPEED = {
    **{f"stage {stage}": deepspeed(stage) for stage in range(4)},
    **{
        f"stage {s}, states in host memory": deepspeed(s, offload_optimizer=IN_HOST_MEMORY) for s in (1, 2, 3)
    },
    "stage 3, all in host memory": deepspeed(
        3, offload_optimizer=IN_HOST_MEMORY, offload_param=IN_HOST_MEMORY
    ),
}


def case(strategy: Strategy, optimization: Optimization = PLAIN, **changes: Any) -> TrainCase:
    return TrainCase(strategy=strategy, optimization=optimization, **changes)


BOTH = Optimization(learning_rate=3e-3, accumulation_steps=2, gradient_clipping=0.5)


def cases_for(world_size: int) -> dict[str, TrainCase]:
    """What is trained on so many ranks, by name; names of DDP runs begin with "ddp"."""
    nvme = "stage 3, states and parameters on NVMe"
    cases = {"ddp": case(DDP), "ddp accumulated and clipped": case(DDP, BOTH)}
    cases |= {name: case(strategy) for name, strategy in STAGES.items()}
    cases |= {nvme: case(PLACES[nvme]), f"{nvme}, accumulated and clipped": case(PLACES[nvme], BOTH)}
    cases["stage 1, accumulated and clipped"] = case(STAGES["stage 1"], BOTH)
    cases["stage 3, accumulated and clipped"] = case(STAGES["stage 3"], BOTH)
    if world_size == 2:
        cases |= {name: case(strategy) for name, strategy in (PLACES | WAYS | BF16 | OTHERS).items()}
        cases |= {"ddp accumulated": case(DDP, ACCUMULATED), "ddp clipped": case(DDP, CLIPPED)}
        cases["stage 1, accumulated"] = case(STAGES["stage 1"], ACCUMULATED)
        cases["stage 2, accumulated"] = case(STAGES["stage 2"], ACCUMULATED)
        cases["stage 2, clipped"] = case(STAGES["stage 2"], CLIPPED)
        cases["stage 3, fp16"] = case(FP16)
        cases["stage 3, checkpointed"] = case(STAGES["stage 3"], checkpointing=True)
        cases["ddp tied"] = case(DDP, model="tied")
        awkward = Strategy("ddp", {"find_unused_parameters": True})
        cases["ddp awkward"] = case(awkward, SPARED, model="awkward")
        for name in ("stage 1", "stage 3"):
            cases[f"{name}, tied"] = case(STAGES[name], model="tied")
            cases[f"{name}, awkward"] = case(STAGES[name], SPARED, model="awkward")
    if world_size == 4:
        cases["HSDP"] = case(Strategy("fsdp2", {"replicate": 2}))
        for name in ("FSDP2 resharding", "ZeroRedundancyOptimizer"):
            cases[name] = case(OTHERS[name])
    return cases


@functools.cache
def results(world_size: int) -> dict[str, TrainResult]:
    cases = cases_for(world_size)
    ranks = run("validation.training:train_all", world_size, (list(cases.values()),), timeout=400)
    return dict(zip(cases, ranks[0], strict=True))


@functools.cache
def deepspeed_results() -> dict[str, TrainResult]:
    """In ranks of their own: DeepSpeed changes torch for a whole process."""
    cases = {"ddp": case(DDP), **{name: case(strategy) for name, strategy in DEEPSPEED.items()}}
    ranks = run("validation.training:train_all", 2, (list(cases.values()),), timeout=400)
    return dict(zip(cases, ranks[0], strict=True))


def baseline(name: str) -> str:
    for words in ("accumulated and clipped", "accumulated", "clipped", "tied", "awkward"):
        if words in name:
            return f"ddp {words}"
    return "ddp"


def deviation(world_size: int, name: str, other: str | None = None) -> tuple[float, float]:
    """Largest difference in loss over the steps, and in any parameter at the end."""
    return difference(results(world_size)[name], results(world_size)[other or baseline(name)])


def difference(mine: TrainResult, theirs: TrainResult) -> tuple[float, float]:
    assert len(mine.losses) == len(theirs.losses) == 20
    assert mine.parameters.keys() == theirs.parameters.keys()
    parameters = max(
        float(abs(mine.parameters[key] - value).max()) for key, value in theirs.parameters.items()
    )
    return max(abs(a - b) for a, b in zip(mine.losses, theirs.losses, strict=True)), parameters


def names(world_size: int, *without: str) -> list[str]:
    return [
        name
        for name in cases_for(world_size)
        if not name.startswith("ddp") and not any(word in name for word in without)
    ]


EXACT_AT_TWO = names(2, "accumulated", "clipped", "bf16", "fp16")


def test_ddp_learns_so_that_equal_means_something() -> None:
    losses = results(2)["ddp"].losses
    assert losses[-1] < 0.75 * losses[0]


@pytest.mark.parametrize("name", EXACT_AT_TWO)
def test_two_ranks_give_the_same_bits_as_ddp(name: str) -> None:
    """The sum of two numbers has no order."""
    assert deviation(2, name) == (0.0, 0.0)


@pytest.mark.parametrize("name", names(1))
def test_one_rank_is_plain_training(name: str) -> None:
    loss, parameters = deviation(1, name)
    assert loss <= 1e-6
    assert parameters <= 5e-5


@pytest.mark.parametrize("name", names(2, "bf16", "fp16"))
def test_two_ranks_agree_with_ddp_when_sums_are_ordered_otherwise(name: str) -> None:
    loss, parameters = deviation(2, name)
    assert loss <= 1e-6
    assert parameters <= 5e-5


@pytest.mark.parametrize(("world_size", "name"), [(n, name) for n in (3, 4) for name in names(n)])
def test_three_and_four_ranks_agree_with_ddp(world_size: int, name: str) -> None:
    loss, parameters = deviation(world_size, name)
    assert loss <= 1e-6
    assert parameters <= 5e-5


@pytest.mark.parametrize("name", [*BF16, "stage 3, fp16"])
def test_half_precision_stays_near_fp32(name: str) -> None:
    assert deviation(2, name)[0] <= 5e-3


@pytest.mark.parametrize("name", BF16)
def test_stages_give_the_same_bits_in_bf16(name: str) -> None:
    """Gradients are reduced in fp32, and two numbers have one sum."""
    assert deviation(2, name, "stage 0 in bf16, states on the device") == (0.0, 0.0)


@pytest.mark.parametrize("name", DEEPSPEED)
def test_deepspeed_trains_as_ddp_does(name: str) -> None:
    """Sums of stage 3 are ordered otherwise."""
    need_live_deepspeed("not trained here")
    loss, parameters = difference(deepspeed_results()[name], deepspeed_results()["ddp"])
    assert loss <= 1e-6
    assert parameters <= 5e-5
