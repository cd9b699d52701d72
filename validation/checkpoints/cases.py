"""The recorded configurations. No torch needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from validation.record.cases import EXPERT_MODELS, MODELS, deepspeed_config

SAVED_MODELS = {**MODELS, **EXPERT_MODELS}

BF16 = {"bf16": {"enabled": True}}
_FSDP2 = {"kind": "fsdp2", "wrapping": "torchtitan-0.1", "param_dtype": "fp32", "reduce_dtype": "fp32"}


@dataclass(frozen=True)
class SavedCase:
    """A save. `strategy`, `parallelism`: zsim's tables of it; `checkpoint`: the format and its options;
    `options`: the backend's; `ranks`: on how many it is recorded."""

    name: str
    backend: str
    strategy: dict[str, Any]
    checkpoint: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    parallelism: dict[str, Any] = field(default_factory=dict)
    ranks: tuple[int, ...] = (2, 4)
    precision: str = "fp32"
    models: tuple[str, ...] = tuple(MODELS)


def _torch_cases() -> Iterator[SavedCase]:
    dcp = {"format": "dcp"}
    yield SavedCase("ddp-dcp", "ddp", {"kind": "ddp"}, dcp)
    yield SavedCase("ddp-full", "ddp", {"kind": "ddp"}, {"format": "full"})
    yield SavedCase("fsdp2-dcp", "fsdp2", _FSDP2, dcp, ranks=(2, 3, 4))
    yield SavedCase("fsdp2-async", "fsdp2", _FSDP2, {**dcp, "mode": "async"}, ranks=(2,))
    yield SavedCase("fsdp2-threads", "fsdp2", _FSDP2, {**dcp, "threads": 2})
    apart = {**dcp, "single_file_per_rank": False}
    yield SavedCase("fsdp2-apart", "fsdp2", _FSDP2, apart, ranks=(2,), models=("even",))
    yield SavedCase("fsdp2-full", "fsdp2", _FSDP2, {"format": "full"}, ranks=(2,))
    hsdp = {**_FSDP2, "replicate": 2}
    yield SavedCase("hsdp-dcp", "fsdp2", hsdp, dcp, {"replicate": 2}, ranks=(4,))
    two = {"tensor": 2}
    yield SavedCase("tensor-dcp", "tensor", _FSDP2, dcp, {"tensor": 2}, two, ranks=(4,), models=("even",))


def _expert_cases() -> Iterator[SavedCase]:
    """torchtitan's experts on 2 ranks of their own or, on 4, cut over two more each: along experts, or along
    the next dimension where they are "few"; on 4; and with replicas."""
    dcp, titan = {"format": "dcp"}, {**_FSDP2, "wrapping": "torchtitan"}
    two, both = {"expert": 2}, ("experts", "few")
    yield SavedCase("spread2-dcp", "experts", titan, dcp, two, two, models=both)
    yield SavedCase("spread2-full", "experts", titan, {"format": "full"}, two, two, models=both)
    four = {"expert": 4}
    yield SavedCase("spread4-dcp", "experts", titan, dcp, four, four, (4,), models=("experts",))
    hybrid, options = {**titan, "replicate": 2}, {**two, "replicate": 2}
    yield SavedCase("spread2-hsdp", "experts", hybrid, dcp, options, two, (4,), models=both)


def _deepspeed_cases() -> Iterator[SavedCase]:
    """fp16 is refused by DeepSpeed on CPUs."""
    for precision, extra in (("fp32", {}), ("bf16", BF16)):
        for stage in range(4):
            config = {**deepspeed_config(stage), **extra}
            strategy = {"kind": "deepspeed", "config": config}
            yield SavedCase(
                f"deepspeed{stage}-{precision}", "deepspeed", strategy, {"format": "deepspeed"},
                {"config": config}, precision=precision,
            )  # fmt: skip
    config = {**deepspeed_config(3, stage3_gather_16bit_weights_on_model_save=True), **BF16}
    yield SavedCase(
        "deepspeed3-gathered", "deepspeed", {"kind": "deepspeed", "config": config},
        {"format": "deepspeed", "saves_16bit_model": True}, {"config": config}, ranks=(2,), precision="bf16",
    )  # fmt: skip


def _universal_cases() -> Iterator[SavedCase]:
    """DeepSpeed's checkpoints, converted by its `ds_to_universal`."""
    for stage in (1, 2, 3):
        config = {**deepspeed_config(stage), **BF16}
        yield SavedCase(
            f"universal{stage}-bf16", "deepspeed", {"kind": "deepspeed", "config": config},
            {"format": "universal"}, {"config": config}, ranks=(2,), precision="bf16",
        )  # fmt: skip


def _engine_cases() -> Iterator[SavedCase]:
    for stage in range(4):
        options = {"stage": stage}
        strategy = {"kind": "reference", **options}
        yield SavedCase(f"engine{stage}", "engine", strategy, {"format": "reference"}, options)


def saved_cases(*, with_deepspeed: bool = True) -> list[SavedCase]:
    """All configurations."""
    return [
        *_torch_cases(),
        *_engine_cases(),
        *_expert_cases(),
        *((*_deepspeed_cases(), *_universal_cases()) if with_deepspeed else ()),
    ]
