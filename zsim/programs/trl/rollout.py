"""GRPOConfig and RLOOConfig of TRL -> the whole step: a rollout by vLLM, and the updates that it feeds.

Read in TRL 1.10.0.dev0 (f2cd5771): trainer/grpo_config.py and rloo_config.py (`__post_init__`),
trainer/grpo_trainer.py and rloo_trainer.py (`_prepare_inputs`, `_generate_and_score_completions`),
generation/vllm_generation.py, scripts/vllm_serve.py. A rollout has `steps_per_generation` micro-batches of
every GPU, so that its prompts follow from the number of GPUs.
"""

from __future__ import annotations

from zsim.errors import InputError
from zsim.programs.huggingface.job import is_of_release_4
from zsim.programs.rollout import set_rollout, skip_rollout
from zsim.specs.formats.file_values import FileValues

_PROMPT, _COMPLETION = 512, 512
# Trainer -> completions of a prompt, and the weight of the reference, where a file has neither.
ROLLOUTS = {"grpo": (8, 0.0), "rloo": (2, 0.05)}
# Keys of releases before 0.18 (a8cfca6d), whose GRPO had a reference where nothing is said (7359ddcc, 0.19).
_OLDER_DEVICE = "vllm_device"  # of an engine that the trainer itself starts on a GPU beside its own
_REFERENCE_MARKS, _OLDER_BETA = (_OLDER_DEVICE, "vllm_dtype", "vllm_max_model_len"), 0.04
_MODES = ("colocate", "server")
_UPDATE = "of completions at their longest"


def read_lengths(values: FileValues) -> None:
    """Read the caps of prompts and completions. Prompts have none of TRL 1.10's own."""
    prompt = values.count("max_prompt_length") or values.assume("max_prompt_length", _PROMPT)
    completion = values.count("max_completion_length") or values.assume("max_completion_length", _COMPLETION)
    values.put("training.sequence_length", prompt + completion, "max_prompt_length", "max_completion_length")


def read_rollout(values: FileValues, trainer: str) -> None:
    """Read the rollout, once the number of GPUs that train is known.

    Without vLLM, and where an update takes several rollouts, it is left out with a note.
    """
    file = values.file
    steps, iterations = values.count("steps_per_generation"), values.count("num_iterations", 1) or 1
    completions = values.count("generation_batch_size")
    is_older = is_of_release_4(values, "torch_dtype")  # TRL before 1.0 gave engines GPUs of their own
    mode = values.choose("vllm_mode", "server" if is_older else "colocate", _MODES)
    if steps and completions:
        raise InputError(
            f"{file.name}: generation_batch_size: stands beside steps_per_generation, which says the same; "
            "TRL takes one of them"
        )
    if not values.flag("use_vllm"):
        passes = ", and passes of the reference (beta)," if _has_reference(values, trainer) else ""
        skip_rollout(file, f"completions without vLLM (use_vllm){passes} are not simulated", _UPDATE)
        return
    per_gpu = values.count("per_device_train_batch_size", 8) or 8
    accumulation = values.count("gradient_accumulation_steps", 1) or 1
    if mode == "server":
        file.rollout_gpus = 1
        file.note(
            f"vllm_mode server{'' if values.has('vllm_mode') else ', the default before TRL 1.0'}: the file "
            "does not say how many GPUs serve, so one does beside those that "
            "train: rl.rollout.gpus and rl.rollout.tensor say otherwise"
        )

    def resolve(gpus: int) -> None:
        batch = per_gpu * gpus
        if completions and completions % batch:
            raise InputError(
                f"{file.name}: generation_batch_size: found {completions:,}, expected a multiple of "
                f"per_device_train_batch_size {per_gpu} x {gpus} GPUs that train"
            )
        rollout_steps = completions // batch if completions else steps or accumulation
        _set_rollout(values, trainer, mode, gpus, (per_gpu, accumulation, rollout_steps, iterations))

    file.resolve_rollout = resolve


def _has_reference(values: FileValues, trainer: str) -> bool:
    beta = _OLDER_BETA if trainer == "grpo" and values.has(*_REFERENCE_MARKS) else ROLLOUTS[trainer][1]
    return bool(values.number("beta", beta))


def _set_rollout(
    values: FileValues, trainer: str, mode: str, gpus: int, batches: tuple[int, int, int, int]
) -> None:
    """Set the rollout of `gpus` that train.

    `batches` are the completions of a micro-batch, the micro-batches of an update and of a rollout on a GPU,
    and the passes over the rollout.
    """
    file = values.file
    per_gpu, accumulation, steps, iterations = batches
    samples = values.count("num_generations", ROLLOUTS[trainer][0]) or 1
    total = per_gpu * gpus * steps
    if total % samples:
        raise InputError(
            f"{file.name}: num_generations: found {samples}, expected a divisor of the {total:,} completions "
            f"of a rollout ({per_gpu} x {gpus} GPUs that train x {steps} steps)"
        )
    if steps % accumulation:
        reason = f"an update of {accumulation} micro-batches takes no whole part of the {steps} of a rollout"
        skip_rollout(file, reason, _UPDATE)
        return
    length = file.settings.get("training.sequence_length", file.defaults.get("training.sequence_length"))
    cap = values.count("max_completion_length", _COMPLETION) or _COMPLETION
    is_corrected = trainer == "grpo" and values.flag("vllm_importance_sampling_correction", True)
    needs_logprobs = is_corrected or trainer == "rloo" or steps * iterations > accumulation
    tensor = values.count("vllm_tensor_parallel_size", 1) or 1
    is_server = mode == "server"
    if values.flag("vllm_enable_sleep_mode") and is_server:
        file.note("vllm_enable_sleep_mode: no effect with vllm_mode server")
    set_rollout(
        file,
        "trl",
        prompts=total // samples,
        samples=samples,
        mini_batch=per_gpu * gpus * accumulation,
        prompt_cap=int(length or 0) - cap,
        response_cap=cap,
        update=_UPDATE,
        others={
            "algorithm": trainer,
            "placement": "split" if is_server else "colocated",
            "epochs": iterations,
            "reference": "resident" if _has_reference(values, trainer) else "none",
            "old_logprobs": "recomputed" if needs_logprobs else "skipped",
            "rollout.tensor": None if is_server else tensor,
            "rollout.gpu_memory_utilization": None
            if is_server and not values.has(_OLDER_DEVICE)
            else values.number("vllm_gpu_memory_utilization"),
            "rollout.max_num_seqs": None if is_server else per_gpu * tensor * steps,
            "offload.sleep_level": None if is_server else 2 * values.flag("vllm_enable_sleep_mode"),
        },
    )
    if is_server:
        file.defaults["rl.rollout.gpus"] = file.rollout_gpus
