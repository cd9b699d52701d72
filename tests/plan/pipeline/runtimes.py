"""Steps and orders of every framework's pipeline, by its name."""

from __future__ import annotations

from typing import Any

from zsim.frameworks.deepspeed.parallelism import SPLIT_LAYERS
from zsim.frameworks.deepspeed.pipeline import DeepSpeedRuntime
from zsim.frameworks.megatron.nanotron import NanotronRuntime
from zsim.frameworks.megatron.parallelism import MEGATRON, NANOTRON
from zsim.frameworks.megatron.pipeline_runtime import MegatronRuntime
from zsim.frameworks.megatron.settings.config import MegatronConfig
from zsim.frameworks.torch.parallelism import TORCH
from zsim.frameworks.torch.pipeline import TorchRuntime
from zsim.plan.actions import Order, Step
from zsim.plan.pipeline import lowering
from zsim.plan.pipeline.orders import chunk_group_size
from zsim.plan.pipeline.run_actions import PipelineRuntime
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.style import ModelParallelStyle

RUNTIMES: dict[str, tuple[ModelParallelStyle, type[PipelineRuntime]]] = {
    "torch": (TORCH, TorchRuntime),
    "megatron": (MEGATRON, MegatronRuntime),
    "deepspeed": (SPLIT_LAYERS, DeepSpeedRuntime),
    "nanotron": (NANOTRON, NanotronRuntime),
}


def megatron_settings(**settings: Any) -> MegatronConfig:
    """Megatron's data parallelism as core 0.18 runs it, and other settings of its pipeline."""
    plain: dict[str, Any] = {
        "distributed_optimizer": True, "overlap_grad_reduce": False, "overlap_param_gather": False,
        "param_dtype": "bf16", "grad_dtype": "fp32", "average_in_collective": False, "bucket_size": None,
        "optimizer_instances": 1, "is_contiguous": True, "fuses_accumulation": True, "checks_nan": False,
        "waits_sends": True,
    }  # fmt: skip
    return MegatronConfig(**plain | settings)


def parallelism_of(
    schedule: Any, ranks: int, virtual: int, *, csv: str = "", passes: int = 1, framework: str = "torch"
) -> ParallelismConfig:
    return ParallelismConfig(
        pipeline=ranks, schedule=schedule, virtual_stages=virtual, passes=passes, schedule_text=csv,
        style=RUNTIMES[framework][0],
    )  # fmt: skip


def steps_of(
    framework: str,
    schedule: str,
    ranks: int,
    virtual: int,
    micro_batches: int,
    *,
    csv: str = "",
    passes: int = 1,
    **options: Any,
) -> list[list[Step]]:
    """The steps of every rank. `options` are the runtime's own."""
    parallelism = parallelism_of(schedule, ranks, virtual, csv=csv, passes=passes, framework=framework)
    if framework == "megatron":
        options.setdefault("settings", megatron_settings())
    return lowering.steps_of(RUNTIMES[framework][1](parallelism, **options), micro_batches)


def orders_of(
    framework: str,
    schedule: str,
    ranks: int,
    virtual: int,
    micro_batches: int,
    *,
    group_size: int | None = None,
) -> list[Order]:
    size = chunk_group_size(ranks, micro_batches) if framework == "torch" else group_size or ranks
    return lowering.orders_of(schedule, ranks, virtual, micro_batches, size)
