"""NeMo-RL's YAML, with the files that it extends -> the update of the policy as an experiment.

Read in NeMo-RL 7ea279ab: `utils/config.py` (`load_config_with_inheritance`), `models/dtensor/parallelize.py`,
`models/policy/workers/dtensor_policy_worker.py`, `models/megatron/setup.py`, examples/configs/.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zsim.errors import InputError, NotSimulatedError, unreadable_reason
from zsim.programs.environment import read_environment
from zsim.programs.huggingface.adapters import adapter_settings
from zsim.programs.huggingface.job import read_preferences, read_rewards
from zsim.programs.megatron_lm.recipe import pattern_of_modules, read_fields, recipe_adapters
from zsim.programs.nemo_rl.keys import DTENSOR, GENERATION, IDLE, KEYS, MEGATRON, VLLM
from zsim.programs.rollout import PROMPT_TOKENS, set_rollout, skip_rollout
from zsim.reading import read_text
from zsim.specs.formats.config_file import TrainingFile
from zsim.specs.formats.file_values import FileValues
from zsim.specs.formats.program import ProgramSource
from zsim.specs.formats.safe_yaml import load_yaml, resolve_references
from zsim.specs.model.hub_names import locate_model, missing_model
from zsim.specs.strategy.experts import DEDUPLICATING_DISPATCHERS

_MAX_FILES = 20
_ROLLOUTS = ("grpo", "ppo")
_KERNELS = ("attn", "linear", "rms_norm", "experts", "rope_fusion")
_PAIRS = ("dpo", "rm")  # sections of what trains on pairs (nemo_rl/algorithms)
# Of `hf_config_overrides`, what changes neither the shape of the model nor its kernels.
_POSITIONS = ("max_position_embeddings", "rope_scaling", "rope_theta", "rope_parameters")
_UPDATE = "of the policy, over sequences of the longest length"
_OVERRIDE = "_override_"  # a section with it replaces the one that it extends
_ENGINE_TYPES = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "fp8": "fp8"}
_FP8_FIELDS = ("fp8", "fp8_recipe", "fp8_param")
_MEGATRON_SECTIONS = ("optimizer", "distributed_data_parallel_config")
# Of megatron_cfg, with what is simulated in their place.
_MEGATRON_NOTED = {
    "use_fused_linear_logprobs": "the loss keeps its logits",
    "defer_fp32_logits": "logits are fp32 as usual",
    "mtp_use_repeated_layer": "every prediction has a layer of its own",
}
# Of megatron_cfg: of other phases, or without effect on an update.
_MEGATRON_IDLE = (
    "enabled", "env_vars", "checkpoint", "scheduler", "peft", "fp8_cfg", "model_overrides",
    "activation_checkpointing",
    "empty_unused_memory_level", "force_reconvert_from_hf", "pipeline_dtype", "freeze_moe_router",
    "use_gloo_process_groups",
    "moe_per_layer_logging", *_MEGATRON_NOTED,
    "fused_linear_logprobs_chunk_size",
    "offload_modules", "mtp_loss_scaling_factor", "mtp_detach_heads",
    "converter_type",
    "params_dtype", "lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum",
    "data_parallel_sharding_strategy", "optimizer_offload_fraction", "use_fused_weighted_squared_relu",
    "layernorm_epsilon",
)  # fmt: skip


def read_values(name: str, data: Mapping[str, Any]) -> TrainingFile:
    """The update of the policy in NeMo-RL's values by key, of a file called `name` or one with changes."""
    file = TrainingFile(name, program="nemo-rl")
    keys = FileValues.nested(file, resolve_references(_extended(Path(name), data)), KEYS, IDLE)
    for key, feature in (
        ("distillation", "distillation, with passes of a teacher"),
        ("policy.quant_cfg", "quantisation-aware training (ModelOpt)"),
    ):
        if keys.has(key):
            raise NotSimulatedError(f"{file.name}: {key}: zsim does not simulate {feature} of NeMo-RL yet")
    _read_machines(keys)
    keys.read_model("policy.model_name")
    keys.read("policy.train_micro_batch_size", "policy.max_total_sequence_length")
    file.global_batch_size = keys.get("policy.train_global_batch_size")
    file.settings["training.gradient_clipping"] = keys.get("policy.max_grad_norm", 0.0)
    precisions = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    file.settings["training.precision"] = precisions[keys.get("policy.precision", "bfloat16")]
    keys.ignore(f"{DTENSOR}.enabled")
    if keys.get(f"{MEGATRON}.enabled", False):
        _read_megatron(keys)
        keys.ignore(DTENSOR)
    else:
        _read_dtensor(keys)
        keys.ignore(MEGATRON)
    packs = [
        name for name in ("dynamic_batching", "sequence_packing") if keys.get(f"policy.{name}.enabled", False)
    ]
    _note_left_out(keys)
    if keys.has(*_PAIRS):
        _read_pairs(keys)
    elif keys.has(*_ROLLOUTS):
        _read_rollout(keys, packs)
    elif file.rollout_gpus:
        _leave_rollout(keys, "a step without grpo")
    else:
        file.note(f"one update is simulated, {_UPDATE}")
    keys.finish()
    return file


def extended_content(source: ProgramSource) -> dict[str, Any]:
    """A file over those that it extends. Raises InputError for one that is missing."""
    return _extended(Path(source.text), source.content)


def _extended(path: Path, data: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """The file over those that its `defaults` name, which lie beside it."""
    parents = data.get("defaults") or []
    names = [parents] if isinstance(parents, str) else parents
    if depth > _MAX_FILES or not isinstance(names, list):
        raise InputError(f"{path}: defaults: expected the name of a file, or a list of names")
    merged: dict[str, Any] = {}
    for name in names:
        parent = path.parent / str(name)
        try:
            content = load_yaml(read_text(parent), str(parent), resolves=False)
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"{path}: defaults: '{name}': {unreadable_reason(error)}; tried {parent}. This file only "
                "changes some keys of it"
            ) from None
        if not isinstance(content, Mapping):
            raise InputError(f"{parent}: expected keys and values")
        merged = _merged(merged, _extended(parent, content, depth + 1))
    return _merged(merged, {key: value for key, value in data.items() if key != "defaults"})


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        below = result.get(key)
        if isinstance(value, Mapping) and value.get(_OVERRIDE):
            result[key] = {name: entry for name, entry in value.items() if name != _OVERRIDE}
        elif isinstance(value, Mapping):
            result[key] = _merged(below if isinstance(below, Mapping) else {}, value)
        elif value != "???":
            result[key] = value
    return result


def _read_machines(keys: FileValues) -> None:
    """The GPUs that train: all, or those that generation leaves."""
    nodes, per_node = keys.count("cluster.num_nodes", 1), keys.count("cluster.gpus_per_node", 8)
    prefix = "policy.generation.colocated"
    gpus = nodes * per_node
    if not keys.get(f"{prefix}.enabled", True):
        inference_nodes = keys.get(f"{prefix}.resources.num_nodes", 0)
        inference_gpus = keys.get(f"{prefix}.resources.gpus_per_node", per_node)
        generating = inference_nodes * per_node if nodes > 1 and inference_nodes else inference_gpus
        keys.file.note(f"{generating} of {gpus} GPUs generate; {gpus - generating} train")
        if generating >= gpus:
            raise InputError(f"{keys.file.name}: {prefix}.resources: generation takes all GPUs")
        keys.file.rollout_gpus = generating
    keys.file.settings |= {"nodes": nodes, "gpus": gpus}


def _note_left_out(keys: FileValues) -> None:
    """Name what changes the policy or its kernels, and take the variables of the workers' environment."""
    if keys.get("policy.draft.enabled", False):
        keys.file.note("policy.draft: the draft model that is trained beside the policy is left out")
    overrides = {name.partition(".")[0] for name in keys.table("policy.hf_config_overrides")}
    if others := sorted(overrides - {*_POSITIONS}):
        keys.file.note(
            f"policy.hf_config_overrides: left out: {', '.join(others)}; --set model.KEY says them"
        )
    is_megatron = keys.get(f"{MEGATRON}.enabled", False)
    backend = {} if is_megatron else keys.table(f"{DTENSOR}.automodel_kwargs.backend")
    if kernels := [f"{name} {backend[name]}" for name in _KERNELS if name in backend]:
        keys.file.note(
            f"{DTENSOR}.automodel_kwargs.backend: simulated with torch's kernels: {', '.join(kernels)}"
        )
    variables = keys.table(f"{MEGATRON if is_megatron else DTENSOR}.env_vars")
    read_environment(keys.file, {name: str(value) for name, value in variables.items()})


def _read_pairs(keys: FileValues) -> None:
    """Turn the update into one of DPO or of a reward model, whose batches count pairs (algorithms/dpo.py,
    rm.py).
    """
    file, has_adapters = keys.file, any(key.startswith("training.lora.") for key in keys.file.settings)
    if file.global_batch_size is not None:
        file.global_batch_size *= 2
    if keys.has("rm"):
        read_rewards(keys, has_adapters=has_adapters)
        return
    read_preferences(keys, "DPO", reference="base" if has_adapters else "copy")
    file.note(
        "NeMo-RL keeps the reference's weights on the host and copies them over the policy's for its passes: "
        "simulated as a frozen copy that stays on the GPUs"
    )


def _read_rollout(keys: FileValues, packs: Sequence[str]) -> None:
    """The whole step of GRPO or PPO (nemo_rl/algorithms/grpo.py, ppo.py), with the defaults of
    grpo_math_1B.yaml.
    """
    file = keys.file
    loop = next(name for name in _ROLLOUTS if keys.has(name))
    loops_async = f"{loop}.async_{loop}"
    engine, stages = keys.get(f"{GENERATION}.backend", "vllm"), keys.get(f"{VLLM}.pipeline_parallel_size", 1)
    if engine != "vllm" or stages > 1:
        _leave_rollout(keys, f"generation by '{engine}'" if stages == 1 else "engines of several stages")
        return
    samples = keys.count(f"{loop}.num_generations_per_prompt", 16)
    prompts = keys.count(f"{loop}.num_prompts_per_step", 32)
    total = file.settings.get("training.sequence_length", 512)
    cap = min(keys.get(f"{GENERATION}.max_new_tokens", total), total)
    prompt_cap = min(PROMPT_TOKENS, max(1, total // 2))
    is_async = keys.get(f"{loops_async}.enabled", False)
    penalty = keys.get("loss_fn.reference_policy_kl_penalty", 0.01)
    tensor, expert = keys.get(f"{VLLM}.tensor_parallel_size", 1), keys.get(f"{VLLM}.expert_parallel_size", 1)
    is_on_policy = keys.get("loss_fn.force_on_policy_ratio", False)
    if is_async and not file.rollout_gpus:
        _leave_rollout(keys, "asynchronous generation on the GPUs that train")
        return
    if loop == "ppo":
        _note_critic(keys)
        if keys.get("ppo.skip_reference_policy_logprobs_calculation", False):
            penalty = 0
    if keys.get(f"{loop}.use_dynamic_sampling", False):
        file.note("use_dynamic_sampling: say how often prompts are drawn, rl.sampling_rounds")
    set_rollout(
        file,
        "nemo-rl",
        prompts=prompts,
        samples=samples,
        mini_batch=file.global_batch_size or prompts * samples,
        prompt_cap=prompt_cap,
        response_cap=min(cap, total - prompt_cap),
        has_cap=cap < total - prompt_cap,
        update=_UPDATE,
        others={
            "algorithm": loop,
            "epochs": keys.get("ppo.ppo_epochs"),
            "placement": "async" if is_async else "split" if file.rollout_gpus else "colocated",
            "batching": "packed" if packs else "padded",
            "micro_batch_tokens": _packed_tokens(keys, f"{packs[-1]}.train_mb_tokens") if packs else None,
            **_logprob_batch(keys, packs),
            "reference": "resident" if penalty else "none",
            "old_logprobs": "skipped" if is_on_policy else None,
            "max_staleness": keys.get(f"{loops_async}.max_trajectory_age_steps", 1) if is_async else None,
            "partial_rollout": keys.get(f"{loops_async}.in_flight_weight_updates", False)
            if is_async
            else None,
            "rollout.gpus": file.rollout_gpus or None,
            "rollout.engine": engine,
            "rollout.tensor": tensor,
            "rollout.expert": expert if expert > tensor else None,
            "rollout.gpu_memory_utilization": keys.get(f"{VLLM}.gpu_memory_utilization"),
            "rollout.enforce_eager": keys.get(f"{VLLM}.enforce_eager"),
            "rollout.precision": _ENGINE_TYPES.get(keys.get(f"{VLLM}.precision", "bfloat16")),
            "rollout.kv_dtype": "fp8"
            if keys.get(f"{VLLM}.kv_cache_dtype", "auto").startswith("fp8")
            else None,
            "rollout.max_num_seqs": keys.get(f"{GENERATION}.vllm_kwargs.max_num_seqs"),
        },
    )


def _note_critic(keys: FileValues) -> None:
    """Write the critic's model where it is another, and say by whose means it is trained."""
    name = keys.get("value.model_name")
    if name is not None and name != keys.get("policy.model_name"):
        model = locate_model(str(name), [Path(keys.file.name).parent])
        if model is None:
            raise InputError(f"{keys.file.name}: {missing_model('value.model_name', str(name))}")
        if model != keys.file.defaults.get("model"):
            keys.file.settings["rl.critic.model"] = model
    keys.file.note(
        "value: the critic is simulated with the policy's batches and parallelism, not its own, and without "
        "the copies of its states, which wait on the host while the policy trains"
    )


def _logprob_batch(keys: FileValues, packs: Sequence[str]) -> dict[str, int | None]:
    """The micro-batches of passes without backward, as large as an update's where the file does not say."""
    size = keys.count("policy.logprob_batch_size", keys.count("policy.train_micro_batch_size", 1))
    tokens = _packed_tokens(keys, f"{packs[-1]}.logprob_mb_tokens") if packs else None
    if tokens:
        return {"logprob_micro_batch_tokens": tokens}
    return {"logprob_micro_batch_size": size}


def _packed_tokens(keys: FileValues, name: str) -> int | None:
    """Tokens of a packed micro-batch. None where the file leaves them out, as those of full micro-batches."""
    key = f"policy.{name}"
    keys.ignore(key)
    value = keys.values.get(key)
    return value if isinstance(value, int) and value > 0 else None


def _leave_rollout(keys: FileValues, feature: str) -> None:
    """Leave the update on the GPUs that train."""
    file = keys.file
    skip_rollout(file, f"{feature} is not simulated", _UPDATE)
    gpus = file.settings["gpus"] - file.rollout_gpus
    per_node = keys.count("cluster.gpus_per_node", 8)
    file.settings |= {"nodes": -(-gpus // per_node), "gpus": gpus}
    file.rollout_gpus = 0


def _read_dtensor(keys: FileValues) -> None:
    """FSDP2 over blocks and the rest, which are reduced in fp32 after every micro-batch."""
    settings = keys.file.settings
    precision = settings["training.precision"]
    settings |= {"strategy.kind": "fsdp2", "strategy.param_dtype": precision, "strategy.reduce_dtype": "fp32"}
    keys.file.defaults |= {"strategy.no_sync": False, "strategy.wrapping": "huggingface"}
    if (experts := keys.count(f"{DTENSOR}.expert_parallel_size", 1)) > 1:
        # Automodel's parallelizer of mixtures (components/moe/parallelizer.py) shards blocks without experts
        reshards = keys.table(f"{DTENSOR}.moe_parallelizer").get("reshard_after_forward", False)
        keys.file.defaults["strategy.wrapping"] = "torchtitan"
        settings |= {"parallelism.expert": experts, "strategy.reshard_after_forward": reshards}
        backend = keys.table(f"{DTENSOR}.automodel_kwargs.backend")
        name = backend.get("dispatcher") or "torch"
        if name not in ("torch", *DEDUPLICATING_DISPATCHERS):
            expected = ", ".join(("torch", *DEDUPLICATING_DISPATCHERS))
            raise NotSimulatedError(
                f"{keys.file.name}: {DTENSOR}.automodel_kwargs.backend.dispatcher: zsim does not simulate "
                f"{name!r}; expected one of {expected}"
            )
        if name != "torch" or backend.get("enable_deepep"):
            settings["parallelism.dispatcher"] = "deepep" if name == "torch" else name
    if keys.get(f"{DTENSOR}.cpu_offload", False):
        settings["strategy.cpu_offload"] = True
    if keys.get(f"{DTENSOR}.activation_checkpointing", False):
        settings["training.activation_checkpointing"] = "full"
        keys.file.note("activation_checkpointing: blocks are simulated as checkpointed, not their parts")
    if replicas := keys.get(f"{DTENSOR}.dp_replicate_size", 1):
        settings["strategy.replicate"] = replicas
    tensor = keys.get(f"{DTENSOR}.tensor_parallel_size", 1)
    context = keys.get(f"{DTENSOR}.context_parallel_size", 1)
    is_sequence_parallel = keys.get(f"{DTENSOR}.sequence_parallel", False)
    if tensor > 1:
        settings |= {"parallelism.tensor": tensor, "parallelism.sequence_parallel": is_sequence_parallel}
    if context > 1:
        settings["parallelism.context"] = context
    if keys.get(f"{DTENSOR}.custom_parallel_plan"):
        keys.file.note("custom_parallel_plan: layers are split as without it")
    name = keys.get("policy.optimizer.name", "torch.optim.AdamW")
    if name != "torch.optim.AdamW":
        raise NotSimulatedError(
            f"{keys.file.name}: policy.optimizer.name: zsim does not simulate '{name}' there; expected "
            f"torch.optim.AdamW"
        )
    fused, foreach = (keys.get(f"policy.optimizer.kwargs.{kind}") for kind in ("fused", "foreach"))
    implementation = "fused" if fused else "for_loop" if foreach is False else "foreach"
    settings["training.optimizer_implementation"] = implementation
    _read_adapters(keys)


def _read_adapters(keys: FileValues) -> None:
    prefix = f"{DTENSOR}.lora_cfg"
    is_on = keys.get(f"{prefix}.enabled", False)
    rank, alpha = keys.get(f"{prefix}.dim", 8), keys.get(f"{prefix}.alpha", 32)
    targets = keys.get(f"{prefix}.target_modules", [])
    excluded = keys.get(f"{prefix}.exclude_modules", [])
    if is_on:  # without targets every product is one (automodel's `ModuleMatcher`)
        matches_all = keys.get(f"{prefix}.match_all_linear", True) or not targets
        keys.file.settings |= adapter_settings(rank, alpha, "all-linear" if matches_all else targets)
    if is_on and excluded:
        keys.file.settings["training.lora.exclude"] = pattern_of_modules(excluded)


def _read_megatron(keys: FileValues) -> None:
    """Megatron-Core as NeMo-RL sets it up, by the fields of its configurations."""
    table = keys.table(MEGATRON)
    for name, words in _MEGATRON_NOTED.items():
        if table.get(name):
            keys.file.note(f"{MEGATRON}.{name}: left out, so {words}")
    fields: dict[str, Any] = {}
    if table.get("fp8_cfg.enabled"):
        fields |= {name: table[f"fp8_cfg.{name}"] for name in _FP8_FIELDS if f"fp8_cfg.{name}" in table}
    for name, value in table.items():
        section, _, field = name.rpartition(".")
        if section.split(".")[0] in ("", *_MEGATRON_SECTIONS) and field not in (
            *_MEGATRON_IDLE,
            "bf16",
            "fp16",
        ):
            fields["optimizer" if name == "optimizer.optimizer" else field] = value
    if keys.get(f"{MEGATRON}.activation_checkpointing", False):
        granularity = fields.pop("recompute_granularity", "full")
        fields["recompute_granularity"] = granularity
        fields |= {"recompute_method": "uniform", "recompute_num_layers": 1} if granularity == "full" else {}
    else:
        fields = {name: value for name, value in fields.items() if not name.startswith("recompute_")}
    if fields.get("expert_model_parallel_size", 1) == 1:  # they are there for dense models too
        fields = {name: value for name, value in fields.items() if not name.startswith(("moe_", "expert_"))}
    if fields.get("overlap_param_gather") and not fields.get("overlap_grad_reduce"):
        fields["overlap_param_gather"] = False
        keys.file.note(
            "overlap_param_gather: without overlap_grad_reduce all weights are one bucket, which forward "
            "waits for: simulated without it"
        )
    precision = keys.file.settings.pop("training.precision")
    clipping = keys.file.settings.pop("training.gradient_clipping")
    read_fields(keys.file, {**fields, "clip_grad": clipping, precision: True})
    peft = keys.table(f"{MEGATRON}.peft")
    if peft.get("enabled"):
        keys.file.settings |= recipe_adapters(keys.file, peft)
