"""nanotron's YAML -> settings of an experiment, whose engine is `strategy.engine = "nanotron"`.

Read in nanotron 2411b022: `config/config.py`, `config/parallelism_config.py`, `config/models_config.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.programs.nanotron.keys import IDLE, KEYS
from zsim.specs.formats.config_file import TrainingFile
from zsim.specs.formats.file_values import FileValues

_SEQUENCE_PARALLEL = {"ALL_REDUCE": False, "REDUCE_SCATTER": True}
_BUCKET_MIB = 25
# LlamaConfig's, where the file leaves a field out. Qwen2Config has the same.
_MODEL = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_hidden_layers": 32,
    "vocab_size": 32000, "max_position_embeddings": 2048, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
_OTHER_MODELS = re.compile(r"is_(?!llama_|qwen2_)\w+_config|moe_config|sliding_window_size|ssm_cfg")


def read_values(name: str, data: Mapping[str, Any]) -> TrainingFile:
    """The settings in a nanotron YAML.

    Raises InputError for values that nanotron refuses, NotSimulatedError for what zsim does not simulate.
    """
    file = TrainingFile(name, program="nanotron")
    keys = FileValues.nested(file, data, KEYS, IDLE)
    file.settings |= {"strategy.kind": "megatron", "strategy.engine": "nanotron"}
    keys.read(
        "tokens.sequence_length", "tokens.micro_batch_size", "tokens.batch_accumulation_per_replica",
        "model.dtype", "model.make_vocab_size_divisible_by", "parallelism.tp", "parallelism.pp",
        "parallelism.recompute_layer", "optimizer.zero_stage", "optimizer.optimizer_factory.name",
        "optimizer.optimizer_factory.torch_adam_is_fused",
    )  # fmt: skip
    _read_degrees(keys)
    clipping = keys.get("optimizer.clip_grad", 0.0)
    file.settings["training.gradient_clipping"] = clipping
    if not keys.get("optimizer.accumulate_grad_in_fp32", True):
        raise NotSimulatedError(
            f"{file.name}: optimizer.accumulate_grad_in_fp32: zsim does not simulate 16-bit sums of "
            "nanotron's yet; expected true"
        )
    bucket = keys.get("model.ddp_bucket_cap_mb", _BUCKET_MIB)
    if bucket != _BUCKET_MIB and not keys.get("optimizer.zero_stage", 0):
        raise NotSimulatedError(
            f"{file.name}: model.ddp_bucket_cap_mb: zsim simulates nanotron's DDP with buckets of "
            f"{_BUCKET_MIB} MiB, found {bucket}"
        )
    file.defaults["training.device_max_connections"] = 1  # run_train.py exports it
    model = _model(keys)
    if model is not None:
        file.defaults["model"] = model
        _split_stages(keys, model)
    keys.finish()
    return file


def _read_degrees(keys: FileValues) -> None:
    file = keys.file
    for key, feature in (
        ("parallelism.context_parallel_size", "context parallelism of nanotron's"),
        ("parallelism.expert_parallel_size", "expert parallelism of nanotron's"),
    ):
        keys.refuse(key, feature, 1)
    data, tensor, pipeline = (keys.count(f"parallelism.{name}", 1) for name in ("dp", "tp", "pp"))
    file.settings["gpus"] = data * tensor * pipeline
    if tensor > 1:
        mode = str(keys.get("parallelism.tp_mode", "ALL_REDUCE")).upper()
        if mode not in _SEQUENCE_PARALLEL:
            raise InputError(
                f"{file.name}: parallelism.tp_mode: found '{mode}', expected "
                f"{' or '.join(_SEQUENCE_PARALLEL)}"
            )
        file.settings["parallelism.sequence_parallel"] = _SEQUENCE_PARALLEL[mode]
        if keys.get("parallelism.tp_linear_async_communication", False):
            file.settings["parallelism.async_tensor"] = True
        if not keys.get("parallelism.tp_recompute_allgather", True):
            file.note("parallelism.tp_recompute_allgather false: backward is simulated as gathering again")
    if pipeline > 1:
        schedule = keys.get("parallelism.pp_engine", "afab")
        file.settings["parallelism.schedule"] = {"1f1b": "1f1b", "afab": "gpipe"}[schedule]
    keys.ignore("parallelism.tp_mode", "parallelism.tp_linear_async_communication", "parallelism.pp_engine")
    keys.ignore("parallelism.tp_recompute_allgather")


def _model(keys: FileValues) -> dict[str, Any] | None:
    """The model as transformers has it, or None for one that nanotron's Llama is not."""
    config = keys.table("model.model_config")
    if not config:
        return None
    marks = (key.partition(".")[0] for key, value in config.items() if value)
    mark = next((key for key in marks if _OTHER_MODELS.fullmatch(key)), None)
    if mark is not None:
        keys.file.note(f"model.model_config.{mark}: such a model is not read: give it with --model")
        return None
    model = {key: config.get(key, default) for key, default in _MODEL.items()}
    model["num_key_value_heads"] = config.get("num_key_value_heads") or model["num_attention_heads"]
    return {
        **model,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "_name_or_path": "nanotron",
    }


def _split_stages(keys: FileValues, model: Mapping[str, Any]) -> None:
    ranks = keys.count("parallelism.pp", 1)
    if ranks == 1:
        return
    sizes = model["hidden_size"], model["intermediate_size"], model["vocab_size"]
    keys.file.resolve_stages = lambda num_layers: {
        "parallelism.layers_per_stage": stage_layers(num_layers, *sizes, ranks=ranks)
    }


def stage_layers(num_layers: int, hidden: int, ffn: int, vocabulary: int, *, ranks: int) -> list[int]:
    """The layers of each stage. Blocks are dealt out in order, and a stage ends with the block at which the
    running cost exceeds (rank + 1) / ranks of the total.

    A layer costs 4 h h + 3 h f, the LM head h V (h: hidden, f: MLP, V: vocabulary), all other blocks nothing.
    So a stage may have no layer. Source: nanotron of January 2025 (9055c664), `build_model` in
    models/base.py, `get_block_compute_costs` in models/llama.py.
    """
    layer, head = hidden * (4 * hidden + 3 * ffn), hidden * vocabulary
    total, cost, stage = num_layers * layer + head, 0, 0
    layers_per_stage = [0] * ranks
    for _ in range(num_layers):
        layers_per_stage[stage] += 1
        cost += layer
        if cost * ranks > total * (stage + 1):
            stage += 1
    return layers_per_stage
