"""GRPO of ms-swift -> the whole step, by the arguments of TRL's trainer, on which ms-swift's is built.

Read in ms-swift 4.6.0.dev0 (3602360a): rlhf_trainers/args_mixin.py (`_init_generation_batch_params`),
grpo_trainer.py (`_prepare_batch_inputs`, which computes the log-probabilities of every rollout again),
rollout_mixin.py, and arguments/rlhf_args.py `_init_grpo`.
"""

from __future__ import annotations

from collections.abc import Callable

from zsim.programs.rollout import skip_rollout
from zsim.programs.trl.keys import KEYS, SILENT
from zsim.programs.trl.rollout import read_lengths
from zsim.programs.trl.rollout import read_rollout as read_trl_rollout
from zsim.specs.formats.file_values import FileValues

_PROMPT = 512
# Estimator of advantages -> the trainer of TRL with its passes.
_TRAINERS = {"grpo": "grpo", "rloo": "rloo", "reinforce_plus_plus": "rloo"}
_PASSED = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "num_iterations",
    "max_completion_length", "use_vllm", "vllm_mode", "vllm_tensor_parallel_size", "steps_per_generation",
)  # fmt: skip


def read_rollout(values: FileValues) -> None:
    """Read lengths, the update and its rollout.

    Raises NotSimulatedError for models and data beside the trained one's.
    """
    file = values.file
    for key, feature in (
        ("chord_sft_dataset", "batches of fine-tuning between those of GRPO (CHORD)"),
        ("reward_model", "reward models beside the trainer"),
    ):
        if values.has(key):
            raise values.lack(key, feature)
    arguments = {key: value for key in _PASSED if (value := values.get(key)) is not None}
    arguments |= {
        "per_device_train_batch_size": values.count("per_device_train_batch_size", 1),
        "max_prompt_length": values.count("max_length") or _PROMPT,
        "beta": values.number("beta", 0.04),
        "vllm_gpu_memory_utilization": values.number("vllm_gpu_memory_utilization", 0.9),
    }
    if "steps_per_generation" not in arguments and (size := values.count("generation_batch_size")):
        arguments["generation_batch_size"] = size
    if not values.has("max_length"):
        file.note(f"max_length: none, so prompts of at most {_PROMPT} tokens are taken")
    trl_values = FileValues(file, arguments, KEYS, SILENT, "ms-swift")
    read_lengths(trl_values)
    trl_values.count("num_generations")  # checked also where the update alone is simulated
    trainer = _TRAINERS[values.choose("advantage_estimator", "grpo", tuple(_TRAINERS))]
    update = "of completions at their longest"
    if values.flag("async_generate"):
        skip_rollout(file, "rollouts one step ahead (async_generate) are not simulated", update)
    elif (values.count("sequence_parallel_size") or 1) > 1:
        skip_rollout(file, "rollouts of ranks that share sequences are not simulated", update)
    else:
        file.note("GRPO is simulated as that of TRL, whose trainer ms-swift's is built on")
        read_trl_rollout(trl_values, trainer)
        if file.resolve_rollout is not None and arguments.get("vllm_mode") != "server":
            _add_offloads(values, file.resolve_rollout)


# Arguments that ms-swift gives to vLLM's engine, and TRL's do not have.
_ENGINE = {
    "vllm_enforce_eager": "rl.rollout.enforce_eager",
    "vllm_max_num_seqs": "rl.rollout.max_num_seqs",
    "vllm_enable_prefix_caching": "rl.rollout.prefix_caching",
}
_BATCHED_TOKENS = 16_384
"""`max_num_batched_tokens`, which ms-swift leaves to vLLM: its offline default on GPUs of 70 GiB and more."""


def _add_offloads(values: FileValues, resolve: Callable[[int], None]) -> None:
    """Add the states that leave the GPUs in turn where both phases are on the same."""
    file = values.file

    def resolve_with_offloads(gpus: int) -> None:
        resolve(gpus)
        if "rl.framework" not in file.settings:
            return
        file.settings |= {
            "rl.offload.sleep_level": values.count("sleep_level") or 0,
            "rl.offload.parameters": values.flag("offload_model"),
            "rl.offload.optimizer": values.flag("offload_optimizer"),
            "rl.rollout.max_num_batched_tokens": _BATCHED_TOKENS,
        }
        engine = {setting: values.get(key) for key, setting in _ENGINE.items()}
        file.settings |= {setting: value for setting, value in engine.items() if value is not None}

    file.resolve_rollout = resolve_with_offloads
