"""Settings that torch refuses with its pipelines and its asynchronous tensor parallelism.

Sources: torchtitan v0.2.2 distributed/tensor_parallel.py, and torch 2.13
_inductor/fx_passes/micro_pipeline_tp.py, which knows gathers and scatters.
"""

from __future__ import annotations

from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.torch.parallelism import TORCH, ULYSSES
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.parallelism_table import ParallelismTable
from zsim.specs.strategy.style import ModelParallelStyle
from zsim.specs.strategy.training import TrainingConfig

_SPLIT_BACKWARDS = ("interleaved-zero-bubble", "zbv-zero-bubble", "dualpipe-v")


def check_torch_split(model: ModelSpec, training: TrainingConfig, parallelism: ParallelismConfig) -> None:
    """Raises InputError for parallelism that torch refuses, and NotSimulatedError for checkpoints of which it
    recomputes a block once per parameter.
    """
    _check_async(training, parallelism)
    _check_split_backward(training, parallelism)
    if parallelism.pipeline > 1 and model.is_tied:
        raise InputError(
            f"parallelism.pipeline: found {parallelism.pipeline}, but '{model.name}' ties its head to "
            "its embedding, and torchtitan's pipelines share no weight; expected pipeline = 1, or "
            "strategy 'megatron'"
        )


def _check_async(training: TrainingConfig, parallelism: ParallelismConfig) -> None:
    if not parallelism.async_tensor:
        return
    if parallelism.tensor == 1:
        raise InputError("parallelism.async_tensor: has no effect with tensor = 1; expected tensor above 1")
    if not training.compile:
        raise InputError(
            "parallelism.async_tensor: torch.compile makes it, and training.compile is false; expected "
            "training.compile = true"
        )
    if not parallelism.sequence_parallel:
        raise InputError(
            "parallelism.async_tensor: torch.compile fuses all-gathers and reduce-scatters with products, "
            "not all-reduces; expected sequence_parallel = true"
        )


def _check_split_backward(training: TrainingConfig, parallelism: ParallelismConfig) -> None:
    """Each parameter's gradient is a graph task of its own where a schedule splits backward
    (`stage_backward_weight` of torch 2.13 distributed/pipelining/_backward.py), and a checkpoint recomputes
    per graph task (utils/checkpoint.py), or, with selective contexts, raises at the second."""
    policies = {training.activation_checkpointing, *training.block_checkpointing} - {"none"}
    if parallelism.pipeline == 1 or parallelism.schedule not in _SPLIT_BACKWARDS or not policies:
        return
    what = (
        f"training.activation_checkpointing: found '{min(policies)}' with schedule '{parallelism.schedule}'"
    )
    if "selective-op" in policies:
        raise InputError(
            f"{what}, whose backward is in two parts; torch takes selective checkpoints through one backward "
            "only; expected 'none'"
        )
    raise NotSimulatedError(
        f"{what}, whose backward is in two parts: torch recomputes a block for each of its parameters, which "
        "zsim does not simulate; expected 'none', or schedule 'interleaved-1f1b'"
    )


def context_style(requested: ParallelismTable) -> ModelParallelStyle:
    """Ulysses where ranks exchange heads for tokens, and torchtitan's parallelism otherwise."""
    return ULYSSES if requested.context > 1 and requested.context_method == "all-to-all" else TORCH
