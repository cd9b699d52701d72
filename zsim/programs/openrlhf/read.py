"""OpenRLHF's flags -> the step of its supervised trainer, or the update of PPO's actor, under DeepSpeed.

Read in OpenRLHF 3c3be623: `cli/train_sft.py`, `train_dpo.py`, `train_rm.py` and
`train_ppo_ray.py`, `utils/deepspeed/` (`get_train_ds_config`, `get_ds_eval_config`). Flags up to 0.8 are read
by their names of today.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.programs.huggingface.adapters import adapter_settings
from zsim.programs.huggingface.job import read_preferences, read_rewards
from zsim.programs.openrlhf.keys import IDLE, KEYS, RENAMED
from zsim.programs.rollout import PROMPT_TOKENS, set_rollout, skip_rollout
from zsim.specs.formats.config_file import TrainingFile
from zsim.specs.formats.file_values import FileValues

_SFT, _DPO, _RM, _PPO = "train_sft", "train_dpo", "train_rm", "train_ppo_ray"
# Estimator of advantages (openrlhf/cli/train_ppo_ray.py) -> the algorithm whose passes it has.
_ALGORITHMS = {
    "gae": "ppo", "reinforce": "rloo", "rloo": "rloo", "reinforce_baseline": "rloo", "group_norm": "grpo",
    "dr_grpo": "grpo",
}  # fmt: skip
_FILTERING = "algo.dynamic_filtering_enable"
_UPDATE = "of the actor, over sequences of the longest length"
_ATTENTION = {"flash_attention_2": "flash2", "flash_attention_3": "flash3", "eager": "math", "sdpa": "flash"}


def read_values(name: str, target: str, values: Mapping[str, Any]) -> TrainingFile:
    """The settings in the flags of a trainer, on a command line called `name`.

    Raises InputError for impossible values, NotSimulatedError for other trainers and for what zsim lacks.
    """
    trainer = target.rpartition(".")[2].removesuffix(".py")
    if not target.removesuffix(".py").endswith((_SFT, _DPO, _RM, _PPO)):
        raise NotSimulatedError(
            f"{name}: {target}: zsim does not simulate this trainer of OpenRLHF's; expected {_SFT}, {_DPO}, "
            f"{_RM} or {_PPO}"
        )
    is_old = any(key in values for key in ("micro_train_batch_size", "zero_stage", "pretrain"))
    flags = {RENAMED.get(key, key): value for key, value in values.items()}
    file = TrainingFile(name, program="openrlhf")
    keys = FileValues.nested(file, flags, KEYS, IDLE)
    is_ppo = trainer.endswith(_PPO)
    keys.read_model("model.model_name_or_path")
    keys.read(
        "model.gradient_checkpointing_enable", "model.gradient_checkpointing_reentrant", "ds.use_liger_kernel"
    )
    file.settings["training.micro_batch_size"] = keys.count(
        "train.micro_batch_size", 1 if is_ppo or trainer.endswith(_RM) else 8
    )
    file.global_batch_size = keys.count("train.batch_size", 128)
    file.settings["training.sequence_length"] = _length(
        keys, values, 512 if trainer.endswith((_DPO, _RM)) else 2048, is_ppo=is_ppo
    )
    precision = keys.get("ds.param_dtype", "bf16" if not is_old or "bf16" in values else "fp32")
    file.settings["training.precision"] = precision
    is_packed = keys.get("ds.packing_samples", False) or keys.get("train.dynamic_batch_enable", False)
    word = keys.get("ds.attn_implementation", "flash_attention_2")
    file.settings["training.attention"] = _ATTENTION.get(word, "flash2")
    if is_old and not is_packed and not keys.has("ds.attn_implementation", "flash_attn"):
        file.note(
            "attn_implementation: taken as flash_attention_2, as from 0.8.10 on; older releases compute "
            'attention in the open without flash_attn: training.attention = "math"'
        )
    for key, feature, neutral in (
        ("ds.ring_attn_size", "ring attention of OpenRLHF's", 1),
        ("ds.tensor_parallel_size", "DeepSpeed's tensor parallelism of OpenRLHF's", 1),
        ("ds.deepcompile", "DeepCompile's schedules", False),
    ):
        keys.refuse(key, feature, neutral)
    if keys.get("optim", "adam") != "adam":
        raise NotSimulatedError(f"{name}: optim: zsim does not simulate OpenRLHF's Muon")
    _read_zero(keys, precision)
    _read_adapters(keys)
    if trainer.endswith(_DPO):
        _read_preferences(keys)
    if trainer.endswith(_RM):  # rows of pairs through one output (models/model.py, trainer/rm_trainer.py)
        read_rewards(keys, has_adapters=keys.get("ds.lora.rank", 0) > 0)
    if trainer.endswith((_DPO, _RM)):
        file.global_batch_size = 2 * (file.global_batch_size or 1)
    if is_ppo:
        nodes, per_node = keys.count("actor.num_nodes", 1), keys.count("actor.num_gpus_per_node", 8)
        file.settings |= {"nodes": nodes, "gpus": nodes * per_node}
    if is_ppo:
        _read_rollout(keys, is_packed=is_packed)
    elif is_packed:
        file.note("packing_samples: micro-batches are simulated as full, of sequences of the longest length")
    keys.finish()
    return file


def _read_preferences(keys: FileValues) -> None:
    """Read DPO, whose reference is an engine of its own, also beside adapters (cli/train_dpo.py)."""
    keys.refuse("ref.offload", "a reference of OpenRLHF's on the host", False)
    actor = keys.get("model.model_name_or_path")
    keys.refuse("ref.model_name_or_path", "a reference of another model than the one that is trained", actor)
    read_preferences(keys, "DPO", reference="copy")


def _length(keys: FileValues, values: Mapping[str, Any], default: int, *, is_ppo: bool) -> int:
    """The tokens of a sequence at most. Up to 0.8 PPO has one number for prompts and one for responses."""
    old = [values.get(key, 1024) for key in ("prompt_max_len", "generate_max_len")]
    if is_ppo and {"prompt_max_len", "generate_max_len"} & set(values):
        if not all(isinstance(number, int) for number in old):
            raise InputError(f"{keys.file.name}: prompt_max_len, generate_max_len: expected whole numbers")
        return sum(old)
    return keys.count("data.max_len", default)


def _read_rollout(keys: FileValues, *, is_packed: bool) -> None:
    """The whole step (openrlhf/trainer/ppo_trainer.py): the actor's GPUs, and those of the engines.

    A dynamic batch turns packing on (openrlhf/cli/train_ppo_ray.py), without which micro-batches are padded.
    """
    file, estimator = keys.file, keys.get("algo.advantage.estimator", "gae")
    engines, tensor = keys.get("vllm.num_engines"), keys.count("vllm.tensor_parallel_size", 1)
    if engines is None or estimator not in _ALGORITHMS:
        reason = "rollouts without vLLM" if engines is None else f"advantages by '{estimator}'"
        skip_rollout(file, f"{reason} are not simulated", _UPDATE)
        return
    length, training_gpus = file.settings["training.sequence_length"], file.settings["gpus"]
    is_async, is_colocated = keys.get("train.async_enable", False), keys.get("train.colocate_all", False)
    if not is_colocated and (models := _models_apart(keys, estimator)):
        skip_rollout(file, f"{models} on GPUs of their own are not simulated", _UPDATE)
        return
    is_colocated = is_colocated and not is_async
    gpus = engines * tensor
    if is_colocated and gpus != training_gpus:
        skip_rollout(
            file, f"engines on {gpus} of {training_gpus} GPUs of the actor are not simulated", _UPDATE
        )
        return
    if not is_colocated:
        file.rollout_gpus = gpus
        file.settings |= {"gpus": training_gpus + gpus}
        file.settings.pop("nodes")
    prompt_cap = min(PROMPT_TOKENS, max(1, length // 2))
    cap = keys.get("rollout.max_new_tokens", length)
    if keys.values.get(_FILTERING):
        file.note(f"{_FILTERING}: left out: rl.sampling_rounds says how many rollouts a step takes")
    sleeps, is_dynamic = keys.get("ds.enable_sleep", False), keys.get("train.dynamic_batch_enable", False)
    set_rollout(
        file,
        "openrlhf",
        prompts=keys.count("rollout.batch_size", 1024),
        samples=keys.count("rollout.n_samples_per_prompt", 1),
        mini_batch=file.global_batch_size or 128,
        prompt_cap=prompt_cap,
        response_cap=min(cap, length - prompt_cap),
        has_cap=cap < length - prompt_cap,
        update=_UPDATE,
        others={
            "algorithm": _ALGORITHMS[estimator],
            "placement": "async" if is_async else "colocated" if is_colocated else "split",
            "epochs": keys.count("train.max_epochs", 1),
            "reference": "resident" if keys.get("algo.kl.init_coef", 0.01) else "none",
            "batching": "packed" if is_dynamic else "unpadded" if is_packed else None,
            "micro_batch_tokens": keys.get("train.max_tokens_per_gpu", 16192) if is_dynamic else None,
            "max_staleness": keys.get("train.async_queue_size", 1) if is_async else None,
            "partial_rollout": keys.get("train.partial_rollout_enable", False) if is_async else None,
            "rollout.gpus": None if is_colocated else gpus,
            "rollout.tensor": tensor,
            "rollout.gpu_memory_utilization": keys.get("vllm.gpu_memory_utilization", 0.95),
            "rollout.enforce_eager": keys.get("vllm.enforce_eager"),
            "offload.parameters": sleeps if is_colocated else None,
            "offload.optimizer": sleeps if is_colocated else None,
            "offload.sleep_level": int(keys.get("vllm.enable_sleep", False)) if is_colocated else None,
        },
    )


def _models_apart(keys: FileValues, estimator: str) -> str:
    """The models that have GPUs beside the actor's (cli/train_ppo_ray.py, `num_gpus_per_node`)."""
    said = keys.values
    has_reference = keys.get("algo.kl.init_coef", 0.01) and not said.get("train.colocate_actor_ref")
    has_rewards = said.get("reward.model_name_or_path") and not said.get("reward.remote_url")
    models = {"a reference": has_reference, "a critic": estimator == "gae", "a reward model": has_rewards}
    return " and ".join(name for name, is_apart in models.items() if is_apart)


def _read_zero(keys: FileValues, precision: str) -> None:
    """DeepSpeed's configuration, as OpenRLHF makes it."""
    file, stage = keys.file, keys.get("ds.zero_stage", 2)
    zero: dict[str, Any] = {"stage": stage, "offload_param": {"device": "none"}}
    device = "cpu" if keys.get("ds.adam_offload", False) else "none"
    zero["offload_optimizer"] = {"device": device, "pin_memory": True}
    if (size := keys.get("ds.zpg", 1)) > 1:
        zero["zero_hpz_partition_size"] = size
    if keys.get("ds.overlap_comm", False):
        zero |= {"overlap_comm": True, "contiguous_gradients": True}
    config: dict[str, Any] = {
        "zero_optimization": zero,
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16"},
        "gradient_clipping": keys.get("max_norm", 1.0),
    }
    if dtype := keys.get("ds.grad_accum_dtype"):
        config["data_types"] = {"grad_accum_dtype": dtype}
    file.settings |= {
        "strategy.kind": "deepspeed",
        "strategy.config": config,
        "strategy.config_name": "OpenRLHF's DeepSpeed configuration",
    }


def _read_adapters(keys: FileValues) -> None:
    rank, alpha = keys.get("ds.lora.rank", 0), keys.get("ds.lora.alpha", 16)
    targets = keys.get("ds.lora.target_modules", "all-linear")
    is_quantized = keys.get("ds.load_in_4bit", False)
    if rank > 0:
        keys.file.settings |= adapter_settings(rank, alpha, targets)
        if is_quantized:
            keys.file.settings["training.lora.quantized"] = "nf4"
    elif is_quantized:
        raise NotSimulatedError(
            f"{keys.file.name}: load_in_4bit: weights in 4 bits without adapters, which train"
        )
