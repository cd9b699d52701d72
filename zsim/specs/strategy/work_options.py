"""The options on which the work of a training's modules depends, with the kernels of its library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zsim.cost.kernels.layer_kernels import LayerKernelSet
from zsim.cost.kernels.shapes import WorkOptions
from zsim.specs.strategy.registry import kinds_with, role_of
from zsim.specs.strategy.training import TrainingConfig

_MODULE, _COMPILED = "layer_kernels", LayerKernelSet()


def layer_kernel_set(name: str) -> LayerKernelSet:
    """The kernels that `training.layer_kernels` names: torch.compile's, or those in a framework's folder."""
    if name == _COMPILED.name:
        return _COMPILED
    tables: Iterator[Mapping[str, LayerKernelSet]] = (
        role_of(kind, _MODULE, "LAYER_KERNELS") for kind in kinds_with(_MODULE)
    )
    return next(table[name] for table in tables if name in table)


def work_options(training: TrainingConfig) -> WorkOptions:
    """How the modules compute under a training."""
    return WorkOptions(
        training.precision,
        training.attention,
        training.compile,
        training.autocast,
        training.liger,
        training.cross_entropy,
        training.fp8,
        training.gradient_accumulation_steps if training.precision == "fp8" else 1,
        layer_kernel_set(training.layer_kernels),
        training.deterministic_sms,
        training.writes_scores,
        training.expands_groups,
        training.calls_engine,
        training.has_fp32_stream,
    )
