"""A YAML of TRL's scripts -> an experiment: SFT as it is, other trainers by name where zsim has their step,
GRPO and RLOO with their rollouts.

Read in TRL 1.10.0.dev0 (f2cd5771): scripts/sft.py and dpo.py, trainer/*_config.py, trainer/sft_trainer.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zsim.programs.accelerate.read import read_compiler, read_machines, read_precision
from zsim.programs.huggingface.adapters import keep_adapters_in_bf16, write_adapters, write_quantisation
from zsim.programs.huggingface.job import (
    is_of_release_4,
    note_full_length,
    precision_of,
    read_attention,
    read_batch,
    read_checkpointing,
    read_liger,
    read_preferences,
    read_rewards,
    read_synchronisation,
    read_unpaired_preferences,
    refuse_other_jobs,
    write_release,
)
from zsim.programs.huggingface.models import read_model, weights_type, write_types
from zsim.programs.huggingface.optimizers import read_optimizer
from zsim.programs.huggingface.strategies import read_strategy
from zsim.programs.trl import keys as trl_keys
from zsim.programs.trl.keys import ADAPTERS, KEYS, RELEASE, SILENT
from zsim.programs.trl.rollout import ROLLOUTS, read_lengths, read_rollout
from zsim.specs.formats.config_file import TrainingFile
from zsim.specs.formats.file_values import FileValues

_LENGTH = 1024
# Names of the tokens of a sequence: TRL's today and until 0.19, and those of scripts that pass it on.
_LENGTHS = ("max_length", "max_seq_length", "max_seq_len", "model_max_length", "block_size")
_OLDER_KEYS = ("torch_dtype", "max_seq_length", "max_seq_len")  # of releases that ran on transformers 4
PREFERENCES = {"dpo": "DPO", "orpo": "ORPO", "cpo": "CPO", "simpo": "SimPO"}
_OLDER = "TRL before 0.19"
# Accelerate's, which stand in files that `trl` is given (trl cli/commands/training.py).
_PASSED_ON = ("num_machines", "num_processes", "mixed_precision", "dynamo_backend")


def read_values(name: str, data: Mapping[str, Any], trainer: str = "") -> TrainingFile:
    """The settings in TRL's arguments by key, of a file or a command line called `name`.

    `trainer` is the script's, as in "sft" or "dpo", or "hf" for transformers' own. Without it, the keys tell.
    """
    file = TrainingFile(name, program="trl")
    values = FileValues(file, data, KEYS, SILENT, "TRL")
    refuse_other_jobs(values)
    if values.has("accelerate_config"):
        raise values.error(
            "accelerate_config",
            f"the command that takes it, as 'trl sft --config {name}' in place of the file",
        )
    trainer = trainer or trainer_of(values)
    _refuse_trainer(values, trainer)
    has_rollout = trainer in ROLLOUTS
    is_preference = trainer in PREFERENCES
    is_int8 = values.flag("load_in_8bit")
    is_quantised = values.flag("load_in_4bit") or is_int8
    has_adapters = values.flag("use_peft")
    read_model(values, "model_name_or_path", is_quantised=is_quantised)
    read_batch(values)
    # 0.19 took bf16 and checkpoints where nothing is said (a222aeb4), 0.20 no more max_seq_length (e102ac8d).
    is_older = values.has("max_seq_length", "max_seq_len", "evaluation_strategy")
    default = "fp32" if values.flag("fp16") or is_older else "bf16"
    precision = precision_of(values, default)
    passed_on = {key: values.get(key) for key in _PASSED_ON if values.has(key)}
    read_machines(file, passed_on)
    read_compiler(file, passed_on)
    if precision == "fp32":  # training_args.py: the launcher's, where neither bf16 nor fp16 is on
        read_precision(file, passed_on)
        precision = file.settings["training.precision"]
    if not values.has("bf16", "fp16"):
        values.assume("bf16", not is_older)
    file.settings["training.precision"] = precision
    if is_older:
        values.assume("gradient_checkpointing", False)
    read_checkpointing(values, default=not is_older)
    if values.flag("activation_offloading"):  # trainer/sft_trainer.py, models/activation_offloading.py
        if not values.flag("gradient_checkpointing", not is_older):
            raise values.lack("activation_offloading", "all activations on the host until backward")
        file.settings["training.checkpoint_offload"] = "stream"
    values.read("torch_compile")
    has_liger = values.flag("use_liger_kernel") or values.flag("use_liger")
    read_liger(values, "use_liger_kernel" if values.has("use_liger_kernel") else "use_liger")
    if trainer == "sft":
        _read_loss(values, has_liger=has_liger)
    if has_rollout:
        read_lengths(values)
    else:
        _read_length(values)
    read_strategy(values)
    read_optimizer(values, "optim")
    read_synchronisation(values)
    read_attention(values, "attn_implementation")
    weights = weights_type(values, "dtype", "torch_dtype")
    if not values.has("dtype") and not values.has("torch_dtype"):
        weights = "" if is_quantised else values.assume("dtype", "float32") and "fp32"
    write_types(values.file, precision, weights, has_adapters=has_adapters)
    if has_adapters:
        _read_adapters(values, is_quantised=is_quantised, is_cast=trainer != "hf")
    elif is_quantised:
        key = "load_in_8bit" if is_int8 else "load_in_4bit"
        raise values.lack(key, "quantised weights without adapters (use_peft), which nothing trains")
    elif values.has("lora_r"):
        file.note("lora_r: no effect without use_peft, so every weight is trained")
    if is_preference:
        reference = None
        if trainer == "dpo" and not values.flag("precompute_ref_log_probs"):
            reference = "base" if has_adapters else "copy"
        read_preferences(values, PREFERENCES[trainer], reference=reference)
    if trainer == "kto":
        read_unpaired_preferences(values, reference="base" if has_adapters else "copy")
    if trainer == "reward":
        read_rewards(values, has_adapters=has_adapters)
    if has_rollout:
        read_rollout(values, trainer)
    write_release(values, *_OLDER_KEYS)
    values.finish("transformers' Trainer" if trainer == "hf" else _OLDER if is_older else RELEASE)
    return file


def trainer_of(values: FileValues) -> str:
    """The trainer that a file's keys tell, "sft" where they tell none."""
    loss = values.get("loss_type")
    losses = {str(entry) for entry in loss} if isinstance(loss, list) else {str(loss)}
    for trainer, marks in (
        ("ppo", trl_keys.PPO_MARKS),
        ("grpo", trl_keys.GRPO_MARKS),
        ("kto", trl_keys.KTO_MARKS),
        ("simpo", trl_keys.SIMPO_MARKS),
        ("cpo", trl_keys.CPO_MARKS),
        ("reward", trl_keys.REWARD_MARKS),
    ):
        if any(values.has(mark) for mark in marks):
            return trainer
    if values.get("lora_task_type") == "SEQ_CLS":
        return "reward"
    if (name := trainer_in_name(Path(values.file.name))) not in ("", "sft"):
        return name
    has_preference = any(values.has(mark) for mark in trl_keys.PREFERENCE_MARKS)
    return "dpo" if has_preference or losses & set(trl_keys.PREFERENCE_LOSSES) else "sft"


def trainer_in_name(path: Path) -> str:
    """The trainer in the name of a script or of a file, or the one that its folder is called by."""
    trainers = {name: name for name in (*PREFERENCES, *ROLLOUTS, "kto", "reward", "sft")} | {"rm": "reward"}
    words = {trainers[word] for word in re.split(r"[^a-z]+", path.stem.lower()) if word in trainers}
    return words.pop() if len(words) == 1 else trainers.get(path.parent.name.lower(), "")


def _refuse_trainer(values: FileValues, trainer: str) -> None:
    if trainer == "ppo":
        key = next((mark for mark in trl_keys.PPO_MARKS if values.has(mark)), "loss_type")
        expected = "expected a file of SFT, DPO, KTO, ORPO, CPO, GRPO or rewards"
        raise values.lack(key, f"PPO, whose step has rollouts and four models, yet; {expected}")


def _read_loss(values: FileValues, *, has_liger: bool) -> None:
    """Read the loss of SFT, which TRL 1.10 takes in chunks where the file does not say."""
    loss = values.get("loss_type")
    if has_liger or is_of_release_4(values, *_OLDER_KEYS):
        return  # Liger has one of its own, and older releases log no entropy
    if loss not in (None, "chunked_nll"):
        values.choose("loss_type", "nll", ("nll", "dft", "chunked_nll"))
        values.put("training.cross_entropy", "trl", "loss_type")
        return
    values.put("training.cross_entropy", "trl-chunked", "loss_type")
    if loss is None:
        values.file.note(
            "loss_type: taken as chunked_nll, TRL 1.10's default; releases from 0.20 to 1.9 keep all logits: "
            'training.cross_entropy = "trl"'
        )


def _read_length(values: FileValues) -> None:
    key = next((key for key in _LENGTHS if key in values.values), _LENGTHS[0])
    if key in values.values and values.values[key] is None:
        values.file.note(f"{key}: no limit, so the sequence is as long as the experiment says")
    else:
        length = values.count(key) or values.assume(key, _LENGTH)
        values.put("training.sequence_length", length, key)
    note_full_length(values, key, is_packed=values.flag("packing"))


def _read_adapters(values: FileValues, *, is_quantised: bool, is_cast: bool) -> None:
    write_adapters(values, ADAPTERS)
    if is_quantised:
        bits = 8 if values.flag("load_in_8bit") else 4  # `get_quantization_config` takes 4 before 8
        bits = 4 if values.flag("load_in_4bit") else bits
        write_quantisation(values, double=values.flag("use_bnb_nested_quant"), bits=bits)
        if is_cast:
            keep_adapters_in_bf16(values.file.settings)  # sft_trainer.py casts what is trained
