"""verl's YAML -> the update of the actor as an experiment: one optimizer step over a mini-batch of responses.

Read in verl b178a3cd: `workers/fsdp_workers.py` (`_build_model_optimizer`, the division of batches in
`__init__`), `workers/actor/dp_actor.py`, `trainer/config/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.programs.huggingface.adapters import adapter_settings
from zsim.programs.megatron_lm.recipe import read_fields
from zsim.programs.rollout import set_rollout, skip_rollout
from zsim.programs.verl import keys as verl_keys
from zsim.programs.verl.keys import ACTOR, FSDP, IDLE, KEYS, MEGATRON, MODEL, OPTIM, REFERENCE, ROLLOUT
from zsim.specs.formats.file_values import FileValues, silent_keys
from zsim.specs.formats.safe_yaml import resolve_references
from zsim.specs.formats.training_file import TrainingFile
from zsim.specs.model.hub_names import locate_model

_STRATEGIES = ("fsdp", "fsdp2", "megatron")
_ENGINES = ("vllm", "sglang", "trtllm")
_SFT_IDLE = IDLE | silent_keys(
    "optim model.trust_remote_code model.external_lib model.use_shm use_remove_padding"
)


def read_values(name: str, data: Mapping[str, Any]) -> TrainingFile:
    """The update of the actor in verl's values by key, of a file or a command line called `name`."""
    model, table = (_section(name, data, key) for key in ("model", "data"))
    if "actor_rollout_ref" not in data and ({"model", "engine"} & {*data} or "pad_mode" in table):
        if "partial_pretrain" in model:
            return read_sft_values(name, data)
        return read_engine_values(name, data, _engine(name, data))
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
    if strategy not in _STRATEGIES:
        raise NotSimulatedError(
            f"{file.name}: {ACTOR}.strategy: zsim does not simulate '{strategy}' of verl's; expected "
            f"{', '.join(_STRATEGIES)}"
        )
    if strategy == "megatron":
        keys.refuse(f"{MODEL}.enable_activation_offload", "checkpoints of Megatron's on the host")
        _read_megatron(keys)
    else:
        _read_fsdp(keys, strategy, gpus)
        _read_activation_offload(keys)
    update = _read_batch(keys, gpus)
    _read_adapters(keys)
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


def _engine(name: str, data: Mapping[str, Any]) -> str:
    """The engine that a file's `defaults` name (sft_trainer_engine.yaml), or its own strategy."""
    defaults = data.get("defaults")
    for entry in defaults if isinstance(defaults, list) else ():
        for key, value in entry.items() if isinstance(entry, Mapping) else ():
            if str(key).endswith("engine@engine"):
                return str(value)
    return "megatron" if _section(name, data, "engine").get("strategy") == "megatron" else "fsdp"


def _section(name: str, data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The table of this key, empty where there is none."""
    table = data.get(key)
    if not isinstance(table, Mapping | None):
        raise InputError(f"{name}: {key}: found {table!r}, expected keys and values below it")
    return table or {}


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
        replicas = max(1, int(keys.file.settings["gpus"]) // _model_ranks(keys.file))
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
    model_ranks = _model_ranks(file)
    replicas = max(1, gpus // model_ranks)
    micro = keys.get(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    whole = keys.get(f"{ACTOR}.ppo_micro_batch_size")
    if (tokens := _dynamic_tokens(keys)) is not None:
        micro = _whole_sequences(tokens // length, max(1, sequences // replicas))
    elif micro is None and whole is not None:
        micro = max(1, whole // replicas)
    if micro is None:
        raise InputError(
            f"{file.name}: {ACTOR}.ppo_micro_batch_size_per_gpu: missing, which verl asks for unless "
            f"use_dynamic_bsz"
        )
    file.settings["training.micro_batch_size"] = micro
    updates = max(1, batch // prompts) * keys.count(f"{ACTOR}.ppo_epochs", 1)
    return f"one of {updates} of the actor, over {sequences:,} sequences of {length:,} tokens, the longest"


def _whole_sequences(limit: int, sequences: int) -> int:
    """The largest number of sequences of at most `limit`, at least one, that divides a rank's."""
    return next((n for n in range(min(limit, sequences), 1, -1) if sequences % n == 0), 1)


def _model_ranks(file: TrainingFile) -> int:
    ranks = 1
    for degree in ("tensor", "pipeline", "context"):
        ranks *= file.settings.get(f"parallelism.{degree}", 1)
    return ranks


def _read_fsdp(keys: FileValues, strategy: str, gpus: int) -> None:
    """FSDP1 or FSDP2, which reduce after every micro-batch, in fp32, and prefetch as torch does."""
    settings = keys.file.settings
    product_dtype = keys.get(f"{FSDP}.dtype", "bfloat16")
    if product_dtype != "bfloat16":
        raise NotSimulatedError(
            f"{keys.file.name}: {FSDP}.dtype: zsim does not simulate {product_dtype} of verl's; expected "
            f"bfloat16"
        )
    settings |= {
        "strategy.kind": "fsdp2" if strategy == "fsdp2" else "fsdp1",
        "strategy.param_dtype": "bf16",
        "strategy.reduce_dtype": "fp32",
        "training.optimizer_implementation": "foreach",
    }
    keys.file.defaults["strategy.no_sync"] = False
    if strategy == "fsdp2":
        keys.file.defaults["strategy.wrapping"] = "huggingface"
    keys.read(f"{FSDP}.mixed_precision.param_dtype", f"{FSDP}.mixed_precision.reduce_dtype")
    keys.read(f"{FSDP}.model_dtype", f"{MODEL}.enable_gradient_checkpointing")
    keys.refuse(f"{FSDP}.wrap_policy.min_num_params", "verl's units by size")
    size = keys.get(f"{FSDP}.fsdp_size", -1)
    if 0 < size < gpus and gpus % size:
        raise InputError(
            f"{keys.file.name}: {FSDP}.fsdp_size: found {size}, expected a divisor of {gpus} GPUs"
        )
    replicas = 1 if size < 0 or size >= gpus else gpus // size
    reshards = keys.get(f"{FSDP}.reshard_after_forward", True)
    if replicas > 1:
        settings["strategy.replicate"] = replicas
    if strategy == "fsdp2":
        settings["strategy.reshard_after_forward"] = reshards
        if keys.get(f"{FSDP}.offload_policy", False):
            settings["strategy.cpu_offload"] = True
        keys.refuse(f"{FSDP}.forward_prefetch", "forward prefetching of verl's FSDP2")
    else:
        sharding = {
            (True, False): "FULL_SHARD", (False, False): "SHARD_GRAD_OP",
            (True, True): "HYBRID_SHARD", (False, True): "_HYBRID_SHARD_ZERO2",
        }  # fmt: skip
        settings["strategy.sharding_strategy"] = sharding[reshards, replicas > 1]
        settings["strategy.forward_prefetch"] = keys.get(f"{FSDP}.forward_prefetch", False)
        keys.ignore(f"{FSDP}.offload_policy")
    _check_optimizer(keys, "AdamW")
    if (context := keys.count(f"{ACTOR}.ulysses_sequence_parallel_size", 1)) > 1:
        settings |= {"parallelism.context": context, "parallelism.context_method": "all-to-all"}
    _note_offloads(keys, FSDP)


def _read_activation_offload(keys: FileValues) -> None:
    """Groups of layers' checkpoints, on a stream of their own (utils/activation_offload.py)."""
    if not keys.get(f"{MODEL}.enable_activation_offload", False):
        return
    if not keys.get(f"{MODEL}.enable_gradient_checkpointing", True):
        keys.refuse(f"{MODEL}.enable_activation_offload", "all activations on the host until backward")
    keys.file.settings["training.checkpoint_offload"] = "stream"


def _note_offloads(keys: FileValues, section: str) -> None:
    """Name what verl keeps on the host between the phases, and has on the GPU during an update."""
    offloads = [name for name in verl_keys.OFFLOADS if keys.values.get(f"{section}.{name}") is True]
    keys.ignore(*(f"{section}.{name}" for name in verl_keys.OFFLOADS))
    if offloads:
        keys.file.note(
            f"{', '.join(offloads)}: on the GPU during the update; the copies before and behind it are left "
            "out where one update is simulated alone"
        )


def _read_megatron(keys: FileValues) -> None:
    """Megatron-Core as verl sets it up, by the fields of its configurations."""
    fields: dict[str, Any] = dict(verl_keys.MEGATRON_DEFAULTS)
    # Of FSDP's actor. Megatron's has recompute_granularity.
    keys.ignore(f"{MODEL}.enable_gradient_checkpointing")
    _note_offloads(keys, MEGATRON)
    for name, value in keys.table(MEGATRON).items():
        field = name.rpartition(".")[2]
        if field not in (*verl_keys.OFFLOADS, *verl_keys.IDLE_FIELDS):
            fields[field] = value
    fields |= keys.table(f"{OPTIM}.override_optimizer_config")
    if fields.get("optimizer_cpu_offload") is not True:
        fields = {name: value for name, value in fields.items() if name not in verl_keys.HOST_UPDATE}
    _check_optimizer(keys, "adam")
    read_fields(keys.file, {**fields, "bf16": True})


def _check_optimizer(keys: FileValues, usual: str) -> None:
    """Refuse other optimizers than the engine's usual one (workers/config/optimizer.py)."""
    name = keys.get(f"{OPTIM}.optimizer", usual)
    library = keys.get(f"{OPTIM}.optimizer_impl", "torch.optim")
    if name.lower() != usual.lower() or library != "torch.optim":
        raise NotSimulatedError(
            f"{keys.file.name}: {OPTIM}.optimizer: zsim does not simulate '{name}' of {library} under verl; "
            f"expected {usual}"
        )


def _read_adapters(keys: FileValues) -> None:
    """Read the adapters. FSDP keeps frozen weights as trained ones are loaded."""
    rank, alpha = keys.get(f"{MODEL}.lora_rank", 0), keys.get(f"{MODEL}.lora_alpha", 16)
    targets = keys.get(f"{MODEL}.target_modules", "all-linear")
    if rank > 0:
        keys.file.settings |= adapter_settings(rank, alpha, targets)
        is_sharded = keys.file.settings["strategy.kind"] != "megatron"
        if is_sharded and keys.get(f"{FSDP}.model_dtype", "fp32") in ("fp32", "float32"):
            keys.file.settings["training.frozen_dtype"] = "fp32"


def read_engine_values(
    name: str, data: Mapping[str, Any], backend: str = "fsdp", gpus: int | None = None
) -> TrainingFile:
    """verl's fine-tuning by the engine of its actors, of a file or a command line called `name` that starts
    `gpus` processes, or those of its `trainer`.

    Read in `trainer/sft_trainer.py`, `trainer/config/sft_trainer_engine.yaml`, `engine/` and `optim/`.
    """
    if backend not in ("fsdp", "megatron"):
        raise NotSimulatedError(
            f"{name}: engine: zsim does not simulate '{backend}' of verl's; expected fsdp or megatron"
        )
    data = resolve_references(data)
    engine, optim, model = (dict(_section(name, data, key)) for key in ("engine", "optim", "model"))
    strategy = engine.pop("strategy", backend)
    strategies = [entry for entry in _STRATEGIES if entry.startswith(backend)]
    if strategy not in strategies:
        raise NotSimulatedError(
            f"{name}: engine.strategy: zsim does not simulate '{strategy}' of verl's with the engine "
            f"{backend}; expected {' or '.join(strategies)}"
        )
    if backend == "fsdp" and (key := next((key for key in engine if key in verl_keys.MEGATRON_KEYS), None)):
        raise InputError(
            f"{name}: engine.{key}: is of verl's Megatron, and the engine is fsdp; expected 'engine@engine: "
            "megatron' in defaults, or engine=megatron in the command"
        )
    actor = {
        "strategy": strategy,
        "ulysses_sequence_parallel_size": engine.pop("ulysses_sequence_parallel_size", 1),
        "fsdp_config" if backend == "fsdp" else backend: engine,
        "optim": optim,
    }
    rest = {key: value for key, value in data.items() if key not in ("engine", "model")}
    values = {**rest, "actor_rollout_ref": {"model": model, "actor": actor}}
    return _read_tuning(name, values, verl_keys.ENGINE_NAMES, strategy, gpus)


def read_sft_values(name: str, data: Mapping[str, Any]) -> TrainingFile:
    """verl's fine-tuning without an engine, by overrides, of a command line called `name`.

    Read in `trainer/fsdp_sft_trainer.py`, `trainer/config/sft_trainer.yaml` and
    `utils/dataset/sft_dataset.py`, which pads every sequence to `data.max_length`.

    Raises InputError for values that verl refuses, NotSimulatedError for what zsim does not simulate.
    """
    data = resolve_references(data)
    model, sizes = dict(_section(name, data, "model")), _section(name, data, "data")
    strategy = model.pop("strategy", None) or "fsdp2"
    if strategy not in ("fsdp", "fsdp2"):
        raise NotSimulatedError(
            f"{name}: model.strategy: zsim does not simulate '{strategy}' of verl's; expected fsdp or fsdp2"
        )
    if "micro_batch_size" in sizes and "micro_batch_size_per_gpu" not in sizes:
        raise InputError(f"{name}: data.micro_batch_size: is of all ranks; expected micro_batch_size_per_gpu")
    further = dict(_section(name, model, "fsdp_config"))
    actor = {
        "strategy": strategy,
        "ulysses_sequence_parallel_size": data.get("ulysses_sequence_parallel_size"),
        "fsdp_config": {key: further.pop(key, None) for key in ("model_dtype", "wrap_policy")},
    }
    renamed = {"path": model.pop("partial_pretrain", None), "fsdp_config": further}
    values = {**data, "actor_rollout_ref": {"model": {**model, **renamed}, "actor": actor}}
    return _read_tuning(name, values, verl_keys.SFT_NAMES, strategy, None)


def _read_tuning(
    name: str, values: Mapping[str, Any], names: Mapping[str, str], strategy: str, gpus: int | None
) -> TrainingFile:
    """Fine-tuning, whose keys have been put where those of an actor stand. `names` are those in the file."""
    file = TrainingFile(name, program="verl")
    keys = FileValues.nested(file, values, KEYS, _SFT_IDLE)
    try:
        if names is verl_keys.ENGINE_NAMES:
            _read_engine(keys, strategy, gpus)
        else:
            _read_sft(keys, strategy)
    except (InputError, NotSimulatedError) as error:
        raise type(error)(_file_keys(str(error), names)) from None
    file.notes = [_file_keys(note, names) for note in file.notes]
    return file


def _file_keys(text: str, names: Mapping[str, str]) -> str:
    """A message with the keys of a file of fine-tuning for those of an actor, as which it is read."""
    for key, own in names.items():
        text = text.replace(key, own)
    return text


def _read_engine(keys: FileValues, strategy: str, gpus: int | None) -> None:
    """Fine-tuning by an engine, which packs micro-batches by tokens."""
    file = keys.file
    if gpus is None and keys.has("trainer.n_gpus_per_node"):
        gpus = keys.count("trainer.nnodes", 1) * keys.count("trainer.n_gpus_per_node", 1)
    if gpus is not None:
        file.settings["gpus"] = gpus
    gpus = gpus or 8
    keys.ignore("checkpoint", f"{MODEL}.use_remove_padding")
    if strategy == "megatron":
        _read_megatron(keys)
    else:
        _read_fsdp(keys, strategy, gpus)
        _read_activation_offload(keys)
    length, sequences = _read_tuned(keys)
    if keys.get("data.use_dynamic_bsz", True):
        tokens = keys.count("data.max_token_len_per_gpu", 8192) * file.settings.get("parallelism.context", 1)
        micro = _whole_sequences(tokens // length, max(1, sequences * _model_ranks(file) // gpus))
        file.settings["training.micro_batch_size"] = micro
    file.note("every sequence is taken at data.max_length, its longest: training.lengths says otherwise")
    keys.finish()


def _read_sft(keys: FileValues, strategy: str) -> None:
    """Fine-tuning by FSDP alone."""
    file = keys.file
    if not keys.has("model.strategy"):
        file.note(
            "model.strategy: taken as fsdp2, the default since May 2025, before which there was FSDP1 alone"
        )
    keys.refuse("model.lora_adapter_path", "adapters whose rank a checkpoint says")
    _read_fsdp(keys, strategy, 1)
    _read_tuned(keys)
    offloads = keys.get("model.fsdp_config.offload_params", False)
    if keys.get("model.fsdp_config.cpu_offload", False) and offloads:
        file.settings["strategy.cpu_offload"] = True
    if keys.has("data.micro_batch_size"):
        file.note(
            "data.micro_batch_size: older releases cut it over the ranks; micro_batch_size_per_gpu counts"
        )
    if strategy == "fsdp" and any(key.startswith("training.lora") for key in file.settings):
        file.note("adapters are units of FSDP's of their own in verl; simulated is one unit per block")
    is_packed = keys.values.get("use_remove_padding") is True
    file.note(f"every sequence is {'taken at' if is_packed else 'padded to'} data.max_length")
    keys.ignore(
        "model", "ulysses_sequence_parallel_size",
        *(f"{MODEL}.fsdp_config.{key}" for key in ("cpu_offload", "offload_params")),
    )  # fmt: skip
    keys.finish()


def _read_tuned(keys: FileValues) -> tuple[int, int]:
    """Read what both trainers have, behind the engine. Returns tokens of a sequence, sequences of a step."""
    file = keys.file
    keys.ignore(f"{ACTOR}.strategy")
    keys.read_model(f"{MODEL}.path")
    keys.read(f"{MODEL}.use_liger", "optim.clip_grad")
    length, sequences = keys.count("data.max_length", 1024), keys.count("data.train_batch_size", 256)
    file.settings |= {
        "training.precision": "bf16",
        "training.sequence_length": length,
        "training.micro_batch_size": keys.count("data.micro_batch_size_per_gpu", 4),
    }
    file.global_batch_size = sequences
    file.epochs = keys.count("trainer.total_epochs", 4)
    _read_adapters(keys)
    return length, sequences
