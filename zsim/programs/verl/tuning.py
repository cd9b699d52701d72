"""verl's fine-tuning -> an experiment: its keys are read where those of an actor stand.

Read in verl b178a3cd: `trainer/sft_trainer.py`, `trainer/fsdp_sft_trainer.py`, `trainer/config/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zsim.errors import InputError, NotSimulatedError
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
from zsim.programs.verl.keys import ACTOR, IDLE, KEYS, MODEL
from zsim.specs.formats.config_file import TrainingFile, read_renamed
from zsim.specs.formats.file_values import FileValues, silent_keys
from zsim.specs.formats.safe_yaml import resolve_references

_SFT_IDLE = IDLE | silent_keys(
    "optim model.trust_remote_code model.external_lib model.use_shm use_remove_padding"
)


def engine_of(name: str, data: Mapping[str, Any]) -> str:
    """The engine that a file's `defaults` name (sft_trainer_engine.yaml), or its own strategy."""
    defaults = data.get("defaults")
    for entry in defaults if isinstance(defaults, list) else ():
        for key, value in entry.items() if isinstance(entry, Mapping) else ():
            if str(key).endswith("engine@engine"):
                return str(value)
    return "megatron" if section_of(name, data, "engine").get("strategy") == "megatron" else "fsdp"


def section_of(name: str, data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The table of this key, empty where there is none."""
    table = data.get(key)
    if not isinstance(table, Mapping | None):
        raise InputError(f"{name}: {key}: found {table!r}, expected keys and values below it")
    return table or {}


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
    engine, optim, model = (dict(section_of(name, data, key)) for key in ("engine", "optim", "model"))
    strategy = engine.pop("strategy", backend)
    strategies = [entry for entry in STRATEGIES if entry.startswith(backend)]
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
    model, sizes = dict(section_of(name, data, "model")), section_of(name, data, "data")
    strategy = model.pop("strategy", None) or "fsdp2"
    if strategy not in ("fsdp", "fsdp2"):
        raise NotSimulatedError(
            f"{name}: model.strategy: zsim does not simulate '{strategy}' of verl's; expected fsdp or fsdp2"
        )
    if "micro_batch_size" in sizes and "micro_batch_size_per_gpu" not in sizes:
        raise InputError(f"{name}: data.micro_batch_size: is of all ranks; expected micro_batch_size_per_gpu")
    further = dict(section_of(f"{name}: model", model, "fsdp_config"))
    actor = {
        "strategy": strategy,
        "ulysses_sequence_parallel_size": data.get("ulysses_sequence_parallel_size"),
        "fsdp_config": {key: further.pop(key, None) for key in ("model_dtype", "wrap_policy")},
        "optim": section_of(name, data, "optim"),
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

    def read() -> TrainingFile:
        if names is verl_keys.ENGINE_NAMES:
            _read_engine(keys, strategy, gpus)
        else:
            _read_sft(keys, strategy)
        return file

    return read_renamed(read, names)


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
        read_megatron(keys)
    else:
        read_fsdp(keys, strategy, gpus)
        read_activation_offload(keys)
    length, sequences = _read_tuned(keys)
    if keys.get("data.use_dynamic_bsz", True):
        tokens = keys.count("data.max_token_len_per_gpu", 8192) * file.settings.get("parallelism.context", 1)
        micro = whole_sequences(tokens // length, max(1, sequences * model_ranks(file) // gpus))
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
    read_fsdp(keys, strategy, 1)
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
    read_adapters(keys)
    return length, sequences
