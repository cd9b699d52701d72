"""Moments of jobs that torch's engines have in common: evaluation, and full state dicts of models that are
sharded or that every rank holds completely.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar

from zsim.dtypes import DTYPE_BYTES
from zsim.plan.framework_hooks import FrameworkHooks, FrozenStorage
from zsim.plan.moments import (
    EVALUATION,
    GATHERED_SAVE,
    RESUMING,
    UNOFFLOADED_SAVE,
    BetweenSteps,
    JobMoment,
    forward_peak,
    loading,
)
from zsim.plan.ops import Device
from zsim.specs.strategy.training import TrainingConfig

if TYPE_CHECKING:
    from zsim.frameworks.fsdp1.settings import Fsdp1Config
    from zsim.frameworks.fsdp2.settings import Fsdp2Config

PRETRAINED = "transformers 4.46 modeling_utils.py `load_state_dict`"
EVERY_RANK = (
    "every rank of a node reads the whole pretrained model into host memory (from_pretrained); without "
    "low_cpu_mem_usage a randomly filled copy stands beside it"
)
_EVALUATED = 8  # sequences: per_device_eval_batch_size of transformers' TrainingArguments where left out
_FP32 = DTYPE_BYTES["fp32"]
_TRAINERS_LOSSES = ("eager", "eager-shifted-labels")


def evaluation(between_steps: BetweenSteps) -> Iterator[JobMoment]:
    """A forward without gradients of the Trainer's batch, where that is larger than the micro-batch. It holds
    what the step's own forward holds less its activations, and the logits.

        logits = n l v (16 bits + fp32 + fp32)

    n: sequences, l: their length, v: words. There are the model's logits, their cast and the
    log-probabilities (transformers `ForCausalLMLoss`, torch's cross_entropy).
    """
    training = between_steps.job.training
    if training.micro_batch_size >= _EVALUATED or training.cross_entropy not in _TRAINERS_LOSSES:
        return
    bytes_per_logit = DTYPE_BYTES["bf16"] + 2 * _FP32
    logits = _EVALUATED * training.sequence_length * between_steps.job.model.vocab_size * bytes_per_logit
    yield JobMoment(
        EVALUATION, between_steps.context_bytes + between_steps.program.memoize(forward_peak) + logits, None,
        f"at least, with the Hugging Face Trainer's batch of {_EVALUATED} (per_device_eval_batch_size): "
        "logits in 16 bits and twice in fp32, beside all that training holds; with compute_metrics every "
        "batch's logits stay on the GPU besides",
        "transformers loss/loss_utils.py `ForCausalLMLoss`, training_args.py", False,
    )  # fmt: skip


def sharded_moments(state: BetweenSteps, gathered: int, option: str, source: str) -> Iterator[JobMoment]:
    """Moments of FSDP, which gathers `gathered` parameters at a time for a full state dict. `option` is the
    option that asks for one.
    """
    yield from evaluation(state)
    yield loading(
        state, f"{EVERY_RANK}; with fsdp_cpu_ram_efficient_loading one rank of a node does", PRETRAINED,
        state.local_ranks,
    )  # fmt: skip
    yield JobMoment(
        GATHERED_SAVE, state.gpu_bytes + state.stored_bytes * gathered, state.host_bytes + state.weight_bytes,
        f"{option}, offloaded to the host of rank 0: all weights there, besides them the optimizer's states "
        "where they are asked for",
        source, False,
    )  # fmt: skip
    yield JobMoment(
        UNOFFLOADED_SAVE, state.gpu_bytes + state.weight_bytes, None,
        f"{option} without offloading it to the host: every GPU holds all weights", source, False,
    )  # fmt: skip
    if state.num_states is None:
        return
    yield JobMoment(
        RESUMING, None, state.host_bytes + state.checkpoint_bytes,
        "from a whole state dict: rank 0 reads all weights and states into host memory; sharded ones are "
        "read in place",
        source, False,
    )  # fmt: skip


def replicated_moments(state: BetweenSteps) -> Iterator[JobMoment]:
    """Moments of DDP: every rank reads everything."""
    yield from evaluation(state)
    yield loading(state, EVERY_RANK, PRETRAINED, state.local_ranks)
    if state.num_states is None:
        return
    yield JobMoment(
        RESUMING, None, state.host_bytes + state.local_ranks * state.checkpoint_bytes,
        "every rank reads all weights and states into host memory (torch.load to the CPU)",
        "torch 2.13 serialization.py `load`", False,
    )  # fmt: skip


Config = TypeVar("Config", "Fsdp1Config", "Fsdp2Config")


class FsdpHooks(FrameworkHooks[Config]):
    """Parameters are sharded in each replica, and offloaded to the host where that is asked for."""

    originals_note = "PEFT's frozen originals of modules_to_save are in memory, but not in what FSDP gathers"

    def gathers_in_forward(self, config: Config) -> bool:
        return True

    def frozen_storage(self, config: Config, training: TrainingConfig, ranks: int) -> FrozenStorage:
        device: Device = "host" if config.cpu_offload else "gpu"
        return FrozenStorage(training.stored_dtype, ranks // config.replicate, device)

    def is_offloaded(self, config: Config) -> bool:
        return config.cpu_offload
