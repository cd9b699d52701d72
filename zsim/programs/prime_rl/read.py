"""prime-rl's TOML of RL or SFT -> one update of the trainer, on the GPUs that train.

Read in prime-rl 559b4477: packages/prime-rl-configs (`trainer.py`, `sft.py`, `rl.py`), src/prime_rl/trainer
(`model.py: setup_fsdp`, `rl/train.py`, `sft/train.py`, `optim/`).

# [Note: prime-rl's defaults]
Blocks are compiled and checkpointed. Checkpoints wait on the host, and so do optimizer states between
updates. Gradients are reduced after every micro-batch. Parameters are kept in fp32 and gathered in bf16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.programs.prime_rl.keys import IDLE, KEYS
from zsim.programs.rollout import PROMPT_TOKENS, set_rollout, skip_rollout
from zsim.specs.formats.config_file import TrainingFile
from zsim.specs.formats.file_values import FileValues
from zsim.specs.library import Library
from zsim.specs.model.expert_layer import has_experts

_MODEL = "trainer.model"
_OPTIMIZERS = {"adamw": "adamw", "sgd": "sgd_momentum"}
_OF_RL = ("orchestrator", "trainer", "inference")
_SHARED = ("model", "optim")  # of a file of SFT, or of the trainer alone
_ROLLOUTS = 128  # of a step
_OLDER_GROUP = "rollouts_per_example"  # still another name of `group_size`
_IN_FLIGHT = "oversampling_factor", "max_inflight_episodes", "max_inflight_rollouts", "concurrency"
_CHUNK = 8192  # tokens, of the head and the loss
_EXPERT_RANKS = 8  # at most, with ep = "auto"
# Adapters' targets by default, of which these are in no dense model.
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_EXPERT_TARGETS = ("experts", "fc1_latent_proj", "fc2_latent_proj")
_ATTENTION = {f"flash_attention_{number}": f"flash{number}" for number in (2, 3, 4)}
_ATTENTION |= {"fa4": "flash4", "eager": "math"}  # before its #3057
_TORCH_ATTENTION = ("auto", "sdpa")
# packages/prime-rl-configs algorithm.py: those that differ in advantages, or in tokens that are trained on.
_ALGORITHMS = ("grpo", "echo", "max_rl", "rae", "hierarchical_grpo")


def read_values(name: str, data: Mapping[str, Any]) -> TrainingFile:
    """The update of the trainer in a prime-rl TOML.

    Raises InputError for values that prime-rl refuses, NotSimulatedError for what zsim does not simulate.
    """
    file = TrainingFile(name, program="prime-rl")
    if "train" in data:
        raise InputError(
            f"{file.name}: is an orchestrator's, which trains nothing; expected the trainer's file"
        )
    is_sft = not any(table in data for table in _OF_RL) and "batch_size" in (data.get("data") or {})
    keys = FileValues.nested(file, _merge_trainer(data), KEYS, IDLE)
    _refuse_others(keys)
    gpus = _read_machines(keys)
    keys.read_model("model.name")
    keys.ignore(f"{_MODEL}.name")
    _read_sharding(keys, gpus)
    _read_recomputation(keys)
    _read_batch(keys, is_sft=is_sft)
    _read_optimizer(keys)
    _read_adapters(keys)
    if not is_sft and keys.has("orchestrator", "inference"):
        _read_rollout(keys)
    elif not is_sft:
        file.note(f"one update is simulated, {_update_of(file)}")
    keys.finish()
    return file


def _merge_trainer(data: Mapping[str, Any]) -> dict[str, Any]:
    """The tables with the trainer's below `trainer`, into which the top level's `model` is written, and a
    group's older name as today's."""
    trainer = dict(data.get("trainer") or {})
    for name in _SHARED:
        trainer[name] = {**(data.get(name) or {}), **(trainer.get(name) or {})}
    tables = {key: value for key, value in data.items() if key != "optim"}
    if isinstance(loop := data.get("orchestrator"), Mapping) and _OLDER_GROUP in loop:
        others = {key: value for key, value in loop.items() if key != _OLDER_GROUP}
        tables["orchestrator"] = {"group_size": loop[_OLDER_GROUP], **others}
    return {**tables, "trainer": trainer}


def _refuse_others(keys: FileValues) -> None:
    keys.ignore("model")
    keys.refuse(f"{_MODEL}.full_offload", "masters and the update on the host, beside backward")
    keys.refuse(f"{_MODEL}.quantization.type", "fp8 of prime-rl's")
    keys.refuse(f"{_MODEL}.debug.num_layers", "a model that is cut off; change model.num_hidden_layers")
    algorithms = {"orchestrator.algo.type": keys.get("orchestrator.algo.type")}
    for number, source in enumerate(keys.values.get("orchestrator.train.source") or ()):
        table = source.get("algo") if isinstance(source, Mapping) else None
        if isinstance(table, Mapping):
            algorithms[f"orchestrator.train.source[{number}].algo.type"] = table.get("type")
    for key, algorithm in algorithms.items():
        if algorithm not in (None, *_ALGORITHMS):
            raise NotSimulatedError(
                f"{keys.file.name}: {key}: zsim does not simulate '{algorithm}', which has passes or scores "
                f"besides the policy's; expected {', '.join(_ALGORITHMS)}"
            )
    if keys.has(f"{_MODEL}.vlm"):
        raise NotSimulatedError(
            f"{keys.file.name}: {_MODEL}.vlm: zsim does not simulate prime-rl's towers yet"
        )


def _read_machines(keys: FileValues) -> int:
    per_node = keys.count("deployment.gpus_per_node", 8)
    if _has_nodes(keys):
        nodes = keys.count("deployment.num_train_nodes", 2)
        keys.file.settings |= {"nodes": nodes, "gpus": nodes * per_node}
        return nodes * per_node
    gpus = keys.count("deployment.num_train_gpus", 1)
    generating = keys.count("deployment.num_infer_gpus", 1) if keys.has("orchestrator", "inference") else 0
    if gpus + generating > per_node:
        words = f"{gpus} beside num_infer_gpus = {generating}" if generating else str(gpus)
        raise InputError(
            f"{keys.file.name}: deployment.num_train_gpus: found {words}, more than a node's {per_node}; "
            'expected type = "multi_node" with num_train_nodes'
        )
    keys.file.settings["gpus"] = gpus
    return gpus


def _has_nodes(keys: FileValues) -> bool:
    return keys.get("deployment.type") == "multi_node" or keys.has("deployment.num_train_nodes")


def _read_sharding(keys: FileValues, gpus: int) -> None:
    file, settings = keys.file, keys.file.settings
    settings |= {
        "strategy.kind": "fsdp2", "strategy.param_dtype": "bf16", "training.precision": "bf16",
        "strategy.no_sync": False, "strategy.wrapping": "torchtitan",
    }  # fmt: skip
    keys.read(f"{_MODEL}.reshard_after_forward", f"{_MODEL}.reduce_dtype")
    if keys.get(f"{_MODEL}.optimization_dtype", "float32") == "bfloat16":
        settings["training.stored_dtype"] = "bf16"
    replicas = keys.count(f"{_MODEL}.dp_replicate", 1)
    if nodes := keys.get("deployment.nodes_per_fsdp_group"):
        replicas = max(1, keys.count("deployment.num_train_nodes", 2) // nodes)
    if replicas > 1:
        settings["strategy.replicate"] = replicas
    if keys.get(f"{_MODEL}.fsdp_cpu_offload", False):
        settings["strategy.cpu_offload"] = True
        if keys.get(f"{_MODEL}.optim_cpu_offload", True):
            raise InputError(
                f"{file.name}: {_MODEL}.fsdp_cpu_offload: prime-rl refuses it beside optim_cpu_offload; "
                "expected optim_cpu_offload = false"
            )
    elif keys.get(f"{_MODEL}.optim_cpu_offload", True):
        settings["strategy.offload_states"] = True
        if not keys.has(f"{_MODEL}.optim_cpu_offload"):
            file.note("optim_cpu_offload is on where left out: optimizer states are copied for every update")
    context = keys.count(f"{_MODEL}.cp", 1)
    if context > 1:
        is_ulysses = keys.get(f"{_MODEL}.cp_style", "ring") == "ulysses"
        method = "all-to-all" if is_ulysses else "all-gather"
        settings |= {"parallelism.context": context, "parallelism.context_method": method}
    _read_experts(keys, gpus // replicas)


def _read_experts(keys: FileValues, ranks: int) -> None:
    degree, settings = keys.get(f"{_MODEL}.ep", "auto"), keys.file.settings
    if degree == "auto":
        name = keys.file.defaults.get("model")
        is_mixture = name is not None and has_experts(Library().model(name))
        degree = min(ranks, _EXPERT_RANKS) if is_mixture else 1
    if not isinstance(degree, int) or degree < 1:
        raise InputError(
            f'{keys.file.name}: {_MODEL}.ep: found {degree!r}, expected "auto" or a number of ranks'
        )
    if degree > 1:
        settings["parallelism.expert"] = degree
        if keys.get(f"{_MODEL}.ep_comm_backend", "torch") == "deepep":
            settings["parallelism.dispatcher"] = "deepep"


def _read_recomputation(keys: FileValues) -> None:
    """See [Note: prime-rl's defaults]. "None" switches a table off."""
    settings = keys.file.settings
    settings["training.compile"] = keys.values.get(f"{_MODEL}.compile") not in ("None", False)
    keys.ignore(f"{_MODEL}.compile")
    is_offloaded = keys.values.get(f"{_MODEL}.ac_offloading") not in ("None", False)
    keys.ignore(f"{_MODEL}.ac_offloading")
    if keys.values.get(f"{_MODEL}.ac") in ("None", False) and not is_offloaded:
        keys.ignore(f"{_MODEL}.ac")
        return
    keys.ignore(f"{_MODEL}.ac.targets")
    if keys.get(f"{_MODEL}.ac.mode", "full") != "full":
        raise NotSimulatedError(
            f"{keys.file.name}: {_MODEL}.ac.mode: zsim does not simulate prime-rl's selective checkpointing; "
            "expected full"
        )
    settings["training.activation_checkpointing"] = "full"
    if (every := keys.count(f"{_MODEL}.ac.freq", 1)) > 1:
        settings["training.checkpoint_every"] = every
    if is_offloaded:
        settings["training.checkpoint_offload"] = "stream"


def _read_batch(keys: FileValues, *, is_sft: bool) -> None:
    file, settings = keys.file, keys.file.settings
    keys.read("data.micro_batch_size")
    chunk = keys.get(f"{_MODEL}.fused_lm_head_token_chunk_size", _CHUNK)
    loss = "prime-rl" if chunk == "disabled" else "prime-rl-chunked"
    settings["training.cross_entropy"] = "eager" if is_sft else loss
    kernels = keys.get(f"{_MODEL}.attn", "auto")
    if kernels in _ATTENTION:
        settings["training.attention"] = _ATTENTION[kernels]
    elif kernels not in _TORCH_ATTENTION:
        raise keys.error(f"{_MODEL}.attn", f"one of {', '.join((*_TORCH_ATTENTION, *_ATTENTION))}")
    elif kernels == "auto":
        file.note(
            'attn: "auto" is FlashAttention-3 on Hopper and 4 on Blackwell; torch\'s kernels are simulated '
            'unless training.attention = "flash3" or "flash4"'
        )
    if not is_sft and chunk not in ("disabled", _CHUNK):
        file.note(f"the head and the loss are taken to run in chunks of {_CHUNK:,} tokens, not of {chunk}")
    if is_sft:
        settings["training.sequence_length"] = keys.count("data.seq_len", 128)
        file.global_batch_size = keys.count("data.batch_size", 128)
        file.note("documents are packed: sequences are full, and their documents attend as one")
        return
    length = keys.get("seq_len", 2048)
    length = keys.get(f"{_MODEL}.seq_len", length)
    settings["training.sequence_length"] = length
    tokens = keys.get("orchestrator.token_batch_size")
    rollouts = keys.count("orchestrator.batch_size", _ROLLOUTS)
    file.global_batch_size = rollouts if tokens is None else max(1, tokens // length)


def _update_of(file: TrainingFile) -> str:
    length = file.settings["training.sequence_length"]
    return f"of the trainer, over {file.global_batch_size:,} sequences of {length:,} tokens, the longest"


def _read_rollout(keys: FileValues) -> None:
    """The whole step, whose engines have GPUs of their own (packages/prime-rl-configs `orchestrator.py`)."""
    file, training_gpus = keys.file, keys.file.settings["gpus"]
    length = keys.count("orchestrator.seq_len", keys.get("seq_len", 2048))
    samples = keys.count("orchestrator.group_size", 1)
    rollouts = file.global_batch_size or _ROLLOUTS
    update = _update_of(file)
    response_cap = keys.get("orchestrator.train.sampling.max_completion_tokens", length)
    if keys.get("orchestrator.token_batch_size") is not None:
        skip_rollout(file, "a batch of tokens, not of rollouts, is not simulated", update)
        return
    if keys.get("inference.deployment.type") == "disaggregated":
        skip_rollout(file, "prefill and decode on nodes of their own are not simulated", update)
        return
    per_node = keys.count("deployment.gpus_per_node", 8)
    if _has_nodes(keys):
        nodes = keys.count("deployment.num_infer_nodes", keys.count("inference.deployment.num_nodes", 1))
        gpus = nodes * keys.count("deployment.num_infer_replicas", 1) * per_node
    else:
        gpus = keys.count("deployment.num_infer_gpus", 1)
    if rollouts % samples:
        skip_rollout(file, f"{rollouts} rollouts are no whole groups of {samples}", update)
        return
    if name := next((name for name in _IN_FLIGHT if keys.has(f"orchestrator.{name}")), None):
        file.note(f"orchestrator.{name}: left out: at most 1,024 rollouts run at once")
    prompt_cap = min(PROMPT_TOKENS, max(1, length // 2))
    transport = keys.get("weight_broadcast.type", "filesystem")
    file.rollout_gpus = gpus
    file.settings |= {"gpus": training_gpus + gpus, "nodes": -(-(training_gpus + gpus) // per_node)}
    set_rollout(
        file,
        "prime-rl",
        prompts=rollouts // samples,
        samples=samples,
        mini_batch=rollouts,
        prompt_cap=prompt_cap,
        response_cap=min(length - prompt_cap, response_cap),
        has_cap=min(length, response_cap + prompt_cap) < file.settings["training.sequence_length"],
        update=update,
        others={
            "algorithm": "grpo",
            "placement": "async",
            "max_staleness": keys.get("orchestrator.max_off_policy_steps", 8),
            "rollout.gpus": gpus,
            **_engine(keys, gpus),
            "sync.transport": "broadcast" if transport == "nccl" else None,
        },
    )


def _engine(keys: FileValues, gpus: int) -> dict[str, Any]:
    """The settings of the engines. vLLM has a table of its own in the release that was read.

    On one node, prime-rl has as many data-parallel ranks as fill the GPUs (`rl.py: auto_setup_deployment`).
    """
    vllm = "inference.vllm"
    tensor = keys.count(f"{vllm}.tensor_parallel_size", keys.count("inference.parallel.tp", 1))
    ranks = keys.count(f"{vllm}.data_parallel_size", keys.count("inference.parallel.dp", 1))
    experts = tensor * ranks if _has_nodes(keys) else gpus
    if gpus % tensor:
        is_older = not keys.has(f"{vllm}.tensor_parallel_size")
        key = "inference.parallel.tp" if is_older else f"{vllm}.tensor_parallel_size"
        raise InputError(
            f"{keys.file.name}: {key}: found {tensor}, which does not divide the {gpus} GPUs that generate"
        )
    weights = keys.get(f"{vllm}.quantization")
    if weights not in (None, "fp8"):
        keys.file.note(f"{vllm}.quantization: '{weights}' is left out: engines are simulated in bf16")
    return {
        "rollout.tensor": tensor,
        "rollout.expert": experts if keys.get(f"{vllm}.enable_expert_parallel", False) else None,
        "rollout.precision": "fp8" if weights == "fp8" else None,
        "rollout.max_num_seqs": keys.get(f"{vllm}.max_num_seqs"),
        **{
            f"rollout.{key}": keys.get(f"{vllm}.{key}", keys.get(f"inference.{key}"))
            for key in ("gpu_memory_utilization", "enforce_eager")
        },
    }


def _read_optimizer(keys: FileValues) -> None:
    name = keys.get("trainer.optim.type", "adamw")
    if name not in _OPTIMIZERS:
        raise NotSimulatedError(
            f"{keys.file.name}: trainer.optim.type: zsim does not simulate '{name}' of prime-rl's; expected "
            f"{' or '.join(_OPTIMIZERS)}"
        )
    settings = keys.file.settings
    settings["training.optimizer"] = _OPTIMIZERS[name]
    is_fused = name == "adamw" and not settings.get("strategy.offload_states")
    settings["training.optimizer_implementation"] = "fused" if is_fused else "foreach"
    keys.read("trainer.optim.max_norm")


def _read_adapters(keys: FileValues) -> None:
    prefix = f"{_MODEL}.lora"
    if not keys.has(prefix):
        return
    targets = keys.get(f"{prefix}.target_modules", list(_TARGETS))
    keys.file.settings |= {
        "training.lora.rank": keys.count(f"{prefix}.rank", 16),
        "training.lora.alpha": keys.get(f"{prefix}.alpha", 32.0),
        "training.lora.dropout": keys.get(f"{prefix}.dropout", 0.0),
        "training.lora.targets": [target for target in targets if target not in _EXPERT_TARGETS],
    }
    if "training.stored_dtype" not in keys.file.settings:  # all weights are of `optimization_dtype`
        keys.file.settings["training.frozen_dtype"] = "fp32"
    if saved := keys.get(f"{prefix}.modules_to_save"):
        keys.file.settings["training.lora.modules_to_save"] = saved
    if "parallelism.expert" in keys.file.settings and (
        not keys.has(f"{prefix}.target_modules") or "experts" in targets
    ):
        raise NotSimulatedError(
            f"{keys.file.name}: {prefix}.target_modules: zsim does not simulate prime-rl's adapters on "
            "experts; expected a list without 'experts'"
        )
