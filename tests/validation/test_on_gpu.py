"""Parity once more where a GPU is, one rank for each: NCCL, real streams, pinned memory, states in files.

The same cases run on the CPU first, so that without a GPU only its own behaviour is left untried.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install zsim[validate]")

from validation.backends import Optimization, Strategy  # noqa: E402
from validation.launch import run  # noqa: E402
from validation.training import TrainCase, TrainResult  # noqa: E402

pytestmark = pytest.mark.torch
OPTIMIZATION = Optimization(learning_rate=3e-3, accumulation_steps=2, gradient_clipping=0.5)
OFF_DEVICE: dict[str, dict[str, Any]] = {
    "stage 2, states in host memory": {"stage": 2, "optimizer_place": "host"},
    "stage 3, all in host memory": {"stage": 3, "optimizer_place": "host", "parameter_place": "host"},
    "stage 3, all in files": {
        "stage": 3,
        "optimizer_place": "nvme",
        "parameter_place": "nvme",
        "prefetch": 2,
    },
}
BF16 = {"stage 3 in bf16": {"stage": 3, "compute_dtype": torch.bfloat16}}
WAYS: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    **OFF_DEVICE,
    **BF16,
}


@functools.cache
def results(device: str, folder: Path) -> dict[str, TrainResult]:
    """On the CPU two ranks; on GPUs as many as there are, up to four."""
    ranks = 2 if device == "cpu" else min(4, torch.cuda.device_count())
    place = {"device": device}

    def engine(options: dict[str, Any]) -> Strategy:
        in_files = {"nvme_folder": folder} if "nvme" in options.values() else {}
        return Strategy("engine", {**options, **place, **in_files})

    strategies = {"ddp": Strategy("ddp"), "FSDP2": Strategy("fsdp2", place)}
    strategies |= {name: engine(options) for name, options in WAYS.items()}
    cases = [
        TrainCase(strategy=strategy, optimization=OPTIMIZATION, steps=6, device=device)
        for strategy in strategies.values()
    ]
    backend = "gloo" if device == "cpu" else "nccl"
    found = run("validation.training:train_all", ranks, (cases,), timeout=300, backend=backend)
    return dict(zip(strategies, found[0], strict=True))


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, TrainResult]:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU here: the engine is not tried on one")
    return results(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("name", ["FSDP2", *WAYS])
def test_every_way_trains_as_ddp_does(name: str, trained: dict[str, TrainResult]) -> None:
    """A GPU adds gradients of an embedding in any order, so bounds are wider than on the CPU."""
    mine, ddp = trained[name], trained["ddp"]
    bound = 5e-3 if name in BF16 else 1e-5
    assert max(abs(a - b) for a, b in zip(mine.losses, ddp.losses, strict=True)) <= bound
    if name not in BF16:
        worst = max(float(abs(mine.parameters[key] - value).max()) for key, value in ddp.parameters.items())
        assert worst <= 1e-4
    assert ddp.losses[-1] < 0.99 * ddp.losses[0]


@pytest.mark.parametrize("name", OFF_DEVICE)
def test_what_was_offloaded_is_not_on_the_device(name: str, trained: dict[str, TrainResult]) -> None:
    held = trained[name].held_bytes
    assert "optimizer_states" not in held["device"]
    assert held["nvme" if "files" in name else "host"]["optimizer_states"] > 0
