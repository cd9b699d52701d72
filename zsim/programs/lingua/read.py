"""lingua's YAML -> settings of an experiment: FSDP2 that keeps blocks gathered between forward and backward.

Read in lingua 437d680e: `lingua/distributed.py` (`parallelize_model`), `lingua/transformer.py`,
`apps/main/train.py` (`validate_train_args`), `apps/main/transformer.py`, `lingua/optim.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.programs.lingua.keys import IDLE, KEYS
from zsim.specs.formats.config_file import TrainingFile
from zsim.specs.formats.file_values import FileValues

_BYTES_VOCABULARY = 258  # lingua/tokenizer.py `ByteTokenizer`: bytes, and two marks
_MULTIPLE = 256


def read_values(name: str, data: Mapping[str, Any]) -> TrainingFile:
    """The settings in a lingua YAML.

    Raises InputError for values that lingua refuses, NotSimulatedError for what zsim does not simulate.
    """
    file = TrainingFile(name, program="lingua")
    keys = FileValues.nested(file, data, KEYS, IDLE)
    for key in ("state_dim", "conv_size", "dimensions"):
        keys.refuse(f"model.{key}", "other models of lingua's than its transformer")
    keys.refuse("model.n_future_head", "heads of further tokens of lingua's", 1)
    keys.refuse("distributed.float8_recipe", 'fp8 of lingua\'s; training.precision = "fp8" is near')
    keys.refuse("distributed.selective_activation_checkpointing", "lingua's checkpointing of the whole model")
    keys.read(
        "data.batch_size", "data.seq_len", "grad_acc_steps", "optim.clip", "distributed.compile",
        "distributed.model_dtype",
    )  # fmt: skip
    _read_sharding(keys)
    _read_model(keys)
    file.note("documents are packed: sequences are full, and their documents attend as one")
    keys.finish()
    return file


def _read_sharding(keys: FileValues) -> None:
    """Blocks are units that stay gathered, the root is not. One shard means one over all ranks."""
    file = keys.file
    kind, shards = keys.get("distributed.fsdp_type", "no_shard"), keys.count("distributed.dp_shard", 1)
    if kind != "full_shard":
        raise NotSimulatedError(
            f"{file.name}: distributed.fsdp_type: found '{kind}': zsim does not simulate FSDP2 over single "
            "ranks; expected full_shard, or an experiment with strategy 'ddp'"
        )
    dtype = file.settings.get("training.precision", "bf16")
    file.settings |= {
        "strategy.kind": "fsdp2", "strategy.reshard_after_forward": False, "strategy.wrapping": "torchtitan",
        "strategy.param_dtype": dtype, "strategy.reduce_dtype": "fp32", "strategy.no_sync": True,
        "training.optimizer_implementation": "fused", "training.cross_entropy": "eager",
    }  # fmt: skip
    replicas, tensor = keys.count("distributed.dp_replicate", 1), keys.count("distributed.tp_size", 1)
    if tensor > 1:
        file.settings |= {"parallelism.tensor": tensor, "parallelism.sequence_parallel": True}
        if keys.get("distributed.compile", False):
            raise InputError(f"{file.name}: distributed.compile: lingua refuses it beside tp_size {tensor}")
    if shards > 1:
        file.settings["strategy.replicate"] = replicas
        file.shard_degree = shards
    elif replicas > 1:
        file.settings["gpus"] = replicas * tensor


def _read_model(keys: FileValues) -> None:
    """Llama's blocks. The MLP's width is rounded up as Llama's is."""
    file = keys.file
    dim, heads, head_dim = keys.count("model.dim", 512), keys.get("model.n_heads"), keys.get("model.head_dim")
    if heads is None and head_dim is None:
        raise InputError(
            f"{file.name}: model.n_heads: missing, and head_dim too; lingua asks for one of them"
        )
    heads = heads or dim // head_dim
    head_dim = head_dim or dim // heads
    width = int((keys.get("model.ffn_dim_multiplier") or 1.0) * int(8 * dim / 3))
    multiple = keys.count("model.multiple_of", _MULTIPLE)
    words = keys.get("model.vocab_size", -1)
    if words < 0 and keys.get("data.tokenizer.name") == "bytes":
        words = _BYTES_VOCABULARY
    model: dict[str, Any] = {
        "hidden_size": dim, "num_hidden_layers": keys.count("model.n_layers", 8),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get("model.n_kv_heads") or heads, "head_dim": head_dim,
        "intermediate_size": -(-width // multiple) * multiple,
        "max_position_embeddings": max(keys.count("model.max_seqlen", 1024), keys.get("data.seq_len", 2048)),
        "tie_word_embeddings": keys.get("model.weight_tying", False), "hidden_act": "silu",
        "model_type": "llama", "_name_or_path": "lingua",
    }  # fmt: skip
    if words < 1:
        file.missing["model"] = (
            "model.vocab_size: left out, so the tokenizer's file says it, which zsim does not read: write it "
            "into the file, or give the model"
        )
        return
    file.defaults["model"] = {**model, "vocab_size": words}
