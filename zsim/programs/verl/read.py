"""verl's YAML -> the update of the actor as an experiment: one optimizer step over a mini-batch of responses.

Read in verl b178a3cd: `workers/fsdp_workers.py` (`_build_model_optimizer`, the division of batches in
`__init__`), `workers/actor/dp_actor.py`, `trainer/config/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.programs.rollout import set_rollout, skip_rollout
from zsim.programs.verl import keys as verl_keys
from zsim.programs.verl.engines import (
    STRATEGIES,
    model_ranks,
    read_activation_offload,
    read_adapters,
    read_fsdp,
    read_megatron,
    whole_sequences,
)
from zsim.programs.verl.keys import ACTOR, FSDP, IDLE, KEYS, MEGATRON, MODEL, REFERENCE, ROLLOUT
from zsim.programs.verl.tuning import engine_of, read_engine_values, read_sft_values, section_of
from zsim.specs.formats.config_file import TrainingFile, change_values, flatten, read_renamed
from zsim.specs.formats.file_values import FileValues
from zsim.specs.formats.safe_yaml import resolve_references
from zsim.specs.model.hub_names import locate_model

_ENGINES = ("vllm", "sglang", "trtllm")


def read_values(name: str, data: Mapping[str, Any]) -> TrainingFile:
    """The update of the actor in verl's values by key, of a file or a command line called `name`."""
    if "worker" in data:
        return _read_easy_r1(name, data)
    model, table = (section_of(name, data, key) for key in ("model", "data"))
    if "actor_rollout_ref" not in data and ({"model", "engine"} & {*data} or "pad_mode" in table):
        if "partial_pretrain" in model:
            return read_sft_values(name, data)
        return read_engine_values(name, data, engine_of(name, data))
    file = TrainingFile(name, program="verl")
    keys = FileValues.nested(file, resolve_references(data), KEYS, IDLE)
    if keys.values.get("trainer.val_only") is True:
        raise InputError(f"{name}: trainer.val_only true: trains nothing; expected a command that trains")
    gpus = keys.count("trainer.nnodes", 1) * keys.count("trainer.n_gpus_per_node", 8)
    file.settings |= {"nodes": keys.count("trainer.nnodes", 1), "gpus": gpus}
    keys.read_model(f"{MODEL}.path")
    keys.read(f"{MODEL}.use_liger", f"{ACTOR}.grad_clip")
    file.settings["training.precision"] = "bf16"
    group = keys.get("model_engine", "dp")
    strategy = keys.get(f"{ACTOR}.strategy", "fsdp" if group == "dp" else group)
    if strategy not in STRATEGIES:
        raise NotSimulatedError(
            f"{file.name}: {ACTOR}.strategy: zsim does not simulate '{strategy}' of verl's; expected "
            f"{', '.join(STRATEGIES)}"
        )
    if strategy == "megatron":
        keys.refuse(f"{MODEL}.enable_activation_offload", "checkpoints of Megatron's on the host")
        read_megatron(keys)
    else:
        read_fsdp(keys, strategy, gpus)
        read_activation_offload(keys)
    update = _read_batch(keys, gpus)
    read_adapters(keys)
    is_fused = keys.get(f"{MODEL}.use_fused_kernels", False)
    if keys.get(f"{ACTOR}.use_fused_kernels", is_fused):
        file.settings["training.cross_entropy"] = "fused_linear"
    elif strategy != "megatron" and (
        keys.get(f"{ACTOR}.entropy_coeff", 0) or keys.get(f"{ACTOR}.calculate_entropy", False)
    ):
        file.settings["training.cross_entropy"] = "verl-entropy"
    _read_rollout(keys, update)
    keys.finish()
    return file


def _read_easy_r1(name: str, data: Mapping[str, Any]) -> TrainingFile:
    """EasyR1's file, whose keys stand for others of verl's, from which it has been forked.

    Read in EasyR1 b44b311: verl/workers/actor/config.py, fsdp_workers.py (`_build_model_optimizer`) and
    actor/dp_actor.py (`update_policy` and `compute_log_prob`, whose micro-batches have the tokens of so many
    longest samples).
    """
    values = dict(flatten(resolve_references(data)))
    for key, feature in verl_keys.EASY_R1_REFUSED.items():
        value = values.pop(key, None)
        if value not in (None, False, "adamw", "default", "fsdp"):
            raise NotSimulatedError(f"{name}: {key}: found {value!r}: zsim does not simulate {feature}")
    others = {key: value for key, value in values.items() if key.partition(".")[0] != "worker"}
    mapped: dict[str, Any] = {**verl_keys.EASY_R1_DEFAULTS, **others}
    for key, target in verl_keys.EASY_R1.items():
        if (value := values.pop(key, None)) is not None:
            mapped[target] = value
    is_host = values.pop("worker.actor.fsdp.enable_cpu_offload", False) is True
    excluded = values.pop("worker.actor.model.lora.exclude_modules", None)
    if values.pop("worker.actor.dynamic_batching", True) is not False:
        sizes = [mapped.get(key, 1) for key in verl_keys.EASY_R1_SIZES]
        if all(isinstance(size, int) and size > 0 for size in sizes):  # others are refused by their keys
            update, experience, prompt, response, ulysses = sizes
            # The limits are those of all ranks of Ulysses, by which verl multiplies its own.
            mapped |= {
                f"{ACTOR}.use_dynamic_bsz": True,
                f"{ACTOR}.ppo_max_token_len_per_gpu": -(-update * (prompt + response) // ulysses),
                f"{ROLLOUT}.log_prob_max_token_len_per_gpu": -(-experience * (prompt + response) // ulysses),
            }
    mapped[f"{ACTOR}.use_kl_loss"] = mapped.pop("algorithm.disable_kl", False) is not True
    names = {target: key for key, target in reversed(verl_keys.EASY_R1.items())}
    file = read_renamed(partial(read_values, name, change_values({}, mapped)), names)
    file.settings["training.optimizer_implementation"] = "fused"
    file.settings.pop("training.frozen_dtype", None)  # in bf16
    if is_host:
        file.settings["strategy.cpu_offload"] = True
    if excluded and "training.lora.rank" in file.settings:
        file.settings["training.lora.exclude"] = str(excluded)
    if unread := [key for key in values if key not in others and key not in verl_keys.EASY_R1_IDLE]:
        file.note(f"not read: {', '.join(unread)}")
    return file


def _read_rollout(keys: FileValues, update: str) -> None:
    """The whole step, whose phases are on all GPUs in turn (verl/trainer/ppo/ray_trainer.py `fit`)."""
    file = keys.file
    estimator = keys.get("algorithm.adv_estimator", "gae")
    engine = keys.get(f"{ROLLOUT}.name", "vllm")
    if reason := _unsimulated(keys, engine, estimator):
        return skip_rollout(file, f"{reason} not simulated", update)
    samples = keys.count(f"{ROLLOUT}.n", 1)
    tensor = keys.count(f"{ROLLOUT}.tensor_model_parallel_size", 2)
    groups = keys.count(f"{ROLLOUT}.data_parallel_size", 1)
    expert = keys.count(f"{ROLLOUT}.expert_parallel_size", 1)
    has_reference = keys.get(f"{ACTOR}.use_kl_loss", False) or keys.get("algorithm.use_kl_in_reward", False)
    section = MEGATRON if file.settings["strategy.kind"] == "megatron" else FSDP
    # Megatron's reference has the actor's, unless its own is said (config/ref/megatron_ref.yaml).
    inherited = keys.values.get(f"{section}.param_offload") if section == MEGATRON else None
    is_host = keys.values.get(section.replace(ACTOR, REFERENCE) + ".param_offload", inherited) is True
    offloads = {name: keys.values.get(f"{section}.{name}") is True for name in verl_keys.OFFLOADS}
    sleeps = keys.get(f"{ROLLOUT}.free_cache_engine", True)
    is_bypassed = keys.get("algorithm.rollout_correction.bypass_mode", keys.has("async_training"))
    is_unpadded = keys.get(f"{MODEL}.use_remove_padding", True)
    tokens = _dynamic_tokens(keys)
    mini_prompts = keys.count(f"{ACTOR}.ppo_mini_batch_size", 256)
    prompts, separate = _read_apart(keys, mini_prompts)
    prompts, rounds = _drawn_prompts(keys, prompts)
    critic = keys.get("critic.model.path") if estimator == "gae" else None
    set_rollout(
        file,
        "verl",
        prompts=prompts,
        samples=samples,
        mini_batch=mini_prompts * samples,
        prompt_cap=keys.get("data.max_prompt_length", 512),
        response_cap=keys.get("data.max_response_length", 512),
        update=update,
        others={
            "algorithm": verl_keys.ALGORITHMS[estimator],
            "epochs": keys.count(f"{ACTOR}.ppo_epochs", 1),
            "batching": "packed" if tokens else "unpadded" if is_unpadded else "padded",
            "micro_batch_tokens": tokens,
            **_logprob_batch(keys, tokens, has_reference=has_reference),
            "reference": "none" if not has_reference else "host" if is_host else "resident",
            "old_logprobs": "rollout" if is_bypassed else None,
            **separate,
            "rollout.engine": engine,
            "rollout.precision": _note_engine(keys),
            "rollout.tensor": tensor,
            "rollout.expert": expert if expert > tensor and groups > 1 else None,
            "rollout.gpu_memory_utilization": keys.get(f"{ROLLOUT}.gpu_memory_utilization"),
            "rollout.max_num_seqs": keys.get(f"{ROLLOUT}.max_num_seqs"),
            "rollout.max_num_batched_tokens": keys.get(f"{ROLLOUT}.max_num_batched_tokens"),
            "rollout.enforce_eager": keys.get(f"{ROLLOUT}.enforce_eager"),
            "rollout.prefix_caching": keys.get(f"{ROLLOUT}.enable_prefix_caching"),
            "offload.parameters": None if separate else offloads["param_offload"],
            "offload.optimizer": None if separate else offloads["optimizer_offload"],
            "offload.sleep_level": None if sleeps or separate else 0,
            "critic.model": None if critic is None else locate_model(critic, [Path(file.name).parent]),
            "reward.model": _reward_model(keys),
            "sampling_rounds": rounds,
        },
    )


def _drawn_prompts(keys: FileValues, prompts: int) -> tuple[int, float | None]:
    """(prompts that a step trains on, its rollouts), where the batch that is drawn has another size
    (recipe/dapo/dapo_ray_trainer.py, trainer/ppo/ray_trainer.py `_create_dataloader`).
    """
    drawn = keys.count("data.gen_batch_size", prompts)
    if drawn == prompts or keys.has("async_training"):
        return prompts, None
    if keys.values.get("algorithm.filter_groups.enable") is not True:
        return drawn, None
    keys.file.note(
        f"data.gen_batch_size {drawn:,}: those whose responses all score alike are dropped until {prompts:,} "
        f"are left; simulated as {drawn / prompts:g} rollouts of {prompts:,}, one after the other"
    )
    return prompts, max(1.0, drawn / prompts)


def _reward_model(keys: FileValues) -> str | None:
    """The model that scores responses, where one is asked for and zsim knows it."""
    for section, name in (("reward_model", "model.path"), ("reward.reward_model", "model_path")):
        if keys.values.get(f"{section}.enable") is True:
            path = str(keys.values.get(f"{section}.{name}"))
            model = locate_model(path, [Path(keys.file.name).parent])
            if model is None:
                keys.file.note(
                    f"{section}.{name}: '{path}' is left out: rl.reward.model gives a model that scores"
                )
            return model
    return None


def _note_engine(keys: FileValues) -> str | None:
    """The type of the engine's weights, with notes on what of the step is left out or the actor's."""
    if keys.values.get(f"{ROLLOUT}.multi_turn.enable") is True:
        keys.file.note(f"{ROLLOUT}.multi_turn: rl.environment says the turns, without which there is one")
    if keys.values.get(f"{ROLLOUT}.over_sample_rate"):
        keys.file.note(f"{ROLLOUT}.over_sample_rate: left out; rl.over_sampling says it")
    for owner, part in (("critic", "critic"), (REFERENCE, "reference")):
        differing = [
            f"{name} {value}"
            for name in verl_keys.DEGREES
            if (value := keys.values.get(f"{owner}.megatron.{name}")) is not None
            and value != keys.values.get(f"{MEGATRON}.{name}", 1)
        ]
        if differing:
            keys.file.note(
                f"{owner}.megatron: the {part} is simulated with the actor's degrees, without "
                f"{', '.join(differing)}"
            )
    weights = keys.get(f"{ROLLOUT}.quantization")
    if weights not in (None, "fp8"):
        keys.file.note(f"{ROLLOUT}.quantization: '{weights}' is left out: engines are simulated in bf16")
    return "fp8" if weights == "fp8" else None


def _unsimulated(keys: FileValues, engine: str, estimator: str) -> str:
    """The part of the step that zsim does not simulate, with its verb. Empty for none."""
    mode = keys.get("trainer.v1.trainer_mode", "sync")
    if mode != "sync":
        return f"trainer.v1.trainer_mode '{mode}' is"
    if keys.has("reward_model.prime_model", "data.n_samples"):
        return "reward_model.prime_model, data.n_samples: samples and rewards of PRIME's fork are"
    if keys.values.get(f"{ROLLOUT}.n_agent") not in (None, 1):
        return f"{ROLLOUT}.n_agent: turns of an agent of Search-R1's fork are"
    if keys.get("distillation.enabled", False):
        return "distillation.enabled: passes of a teacher are"
    if engine not in _ENGINES:
        return f"{ROLLOUT}.name '{engine}' is"
    if estimator not in verl_keys.ALGORITHMS:
        return f"advantages by '{estimator}' are"
    return (
        "engines of several stages are" if keys.get(f"{ROLLOUT}.pipeline_model_parallel_size", 1) > 1 else ""
    )


def _read_apart(keys: FileValues, mini_prompts: int) -> tuple[int, dict[str, Any]]:
    """Prompts of a step, and what `[rl]` says of engines on GPUs of their own.

    One step off policy the next batch is generated while one trains. In the fully asynchronous loop a step is
    what is trained on between two syncs (verl 1dda039b verl/experimental/one_step_off_policy,
    fully_async_policy/config and docs/advance/fully_async.md).
    """
    file = keys.file
    is_streamed = keys.has("async_training")
    if not is_streamed and not keys.has("rollout"):
        return keys.count("data.train_batch_size", 1024), {}
    gpus = keys.count("rollout.nnodes", 1) * keys.count("rollout.n_gpus_per_node", 8)
    file.rollout_gpus = gpus
    file.settings["gpus"] += gpus
    file.settings.pop("nodes")
    separate: dict[str, Any] = {"placement": "async", "max_staleness": 1, "rollout.gpus": gpus}
    if not is_streamed:
        return keys.count("data.train_batch_size", 1024), {**separate, "partial_rollout": False}
    threshold = keys.get("async_training.staleness_threshold", 0.1)
    syncs = keys.count("async_training.trigger_parameter_sync_step", 4)
    batches = keys.count("async_training.require_batches", 1)
    file.note(f"a step is what is trained on between two syncs: {syncs} times {batches} mini-batches")
    separate |= {
        "max_staleness": threshold,
        "stream_prompts": batches * mini_prompts,
        "partial_rollout": keys.get("async_training.partial_rollout", True) if threshold else None,
    }
    return syncs * batches * mini_prompts, separate


def _dynamic_tokens(keys: FileValues) -> int | None:
    """The tokens of a micro-batch that takes as many samples as they hold."""
    if not keys.get(f"{ACTOR}.use_dynamic_bsz", False):
        return None
    tokens: int = keys.get(f"{ACTOR}.ppo_max_token_len_per_gpu", 16384)
    return tokens * int(keys.file.settings.get("parallelism.context", 1))


def _logprob_batch(keys: FileValues, tokens: int | None, *, has_reference: bool) -> dict[str, int | None]:
    """The micro-batches of old log-probabilities and of the reference: by tokens where those of updates are,
    or by samples."""
    limit, size, sum_size = (
        keys.get(f"{ROLLOUT}.log_prob_{name}")
        for name in ("max_token_len_per_gpu", "micro_batch_size_per_gpu", "micro_batch_size")
    )
    is_dynamic = keys.get(f"{ROLLOUT}.log_prob_use_dynamic_bsz", tokens is not None)
    if is_dynamic != (tokens is not None):
        keys.file.note(
            f"{ROLLOUT}.log_prob_use_dynamic_bsz: found {is_dynamic}, which is not the actor's: micro-"
            f"batches of all passes are simulated by {'tokens' if tokens else 'samples'} as the actor's"
        )
    shared: dict[str, Any] = {"use_dynamic_bsz": is_dynamic}
    if tokens:
        shared["max_token_len_per_gpu"] = limit or keys.get(f"{ACTOR}.ppo_max_token_len_per_gpu", 16384)
    else:
        shared |= {"micro_batch_size_per_gpu": size, "micro_batch_size": sum_size}
    for name, shared_value in shared.items() if has_reference else ():
        value = keys.values.get(f"{REFERENCE}.log_prob_{name}")
        if value not in (None, shared_value):
            keys.file.note(
                f"{REFERENCE}.log_prob_{name}: found {value}: the reference is simulated with "
                f"{ROLLOUT}.log_prob_{name}"
            )
    if tokens:
        context = int(keys.file.settings.get("parallelism.context", 1))
        return {"logprob_micro_batch_tokens": limit and limit * context}
    if size is None and sum_size is not None:
        replicas = max(1, int(keys.file.settings["gpus"]) // model_ranks(keys.file))
        size = max(1, sum_size // replicas)
    return {"logprob_micro_batch_size": size}


def _read_batch(keys: FileValues, gpus: int) -> str:
    """An update takes `ppo_mini_batch_size` prompts with `rollout.n` responses each, cut over the ranks.

    Returns of what it is.
    """
    file = keys.file
    length = keys.get("data.max_prompt_length", 512) + keys.get("data.max_response_length", 512)
    file.settings["training.sequence_length"] = length
    responses, batch = keys.count(f"{ROLLOUT}.n", 1), keys.get("data.train_batch_size", 1024)
    prompts = keys.count(f"{ACTOR}.ppo_mini_batch_size", 256)
    if batch and keys.get(f"{ACTOR}.use_dynamic_bsz", False):
        prompts = min(prompts, batch)  # verl cuts what there is, and checks only batches by sequences
    sequences = prompts * responses
    file.global_batch_size = sequences
    replicas = max(1, gpus // model_ranks(file))
    micro = keys.count(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    whole = keys.get(f"{ACTOR}.ppo_micro_batch_size")
    if (tokens := _dynamic_tokens(keys)) is not None:
        micro = whole_sequences(tokens // length, max(1, sequences // replicas))
    elif micro is None and whole is not None:
        micro = max(1, whole // replicas)
    if micro is None:
        raise InputError(
            f"{file.name}: {ACTOR}.ppo_micro_batch_size_per_gpu: missing, which verl asks for unless "
            f"use_dynamic_bsz"
        )
    file.settings["training.micro_batch_size"] = micro
    updates = batch // prompts * keys.count(f"{ACTOR}.ppo_epochs", 1)
    word = f"one of {updates}" if updates > 1 else "one"
    return f"{word} of the actor, over {sequences:,} sequences of {length:,} tokens, the longest"
