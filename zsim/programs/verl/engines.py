"""The engines of verl, by the keys of an actor: FSDP1, FSDP2 and Megatron, with adapters.

Read in verl b178a3cd: `workers/fsdp_workers.py` (`_build_model_optimizer`), `trainer/config/engine/`.
"""

from __future__ import annotations

from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.programs.huggingface.adapters import adapter_settings
from zsim.programs.megatron_lm.recipe import read_fields
from zsim.programs.verl import keys as verl_keys
from zsim.programs.verl.keys import ACTOR, FSDP, MEGATRON, MODEL, OPTIM
from zsim.specs.formats.config_file import TrainingFile
from zsim.specs.formats.file_values import FileValues

STRATEGIES = ("fsdp", "fsdp2", "megatron")


def whole_sequences(limit: int, sequences: int) -> int:
    """The largest number of sequences of at most `limit`, at least one, that divides a rank's."""
    return next((n for n in range(min(limit, sequences), 1, -1) if sequences % n == 0), 1)


def model_ranks(file: TrainingFile) -> int:
    ranks = 1
    for degree in ("tensor", "pipeline", "context"):
        ranks *= file.settings.get(f"parallelism.{degree}", 1)
    return ranks


def read_fsdp(keys: FileValues, strategy: str, gpus: int) -> None:
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
    # The actor's above 1 is written over the engine's (verl b178a3cd, workers/config/actor.py).
    sizes = [keys.count(f"{section}.ulysses_sequence_parallel_size", 1) for section in (ACTOR, FSDP)]
    if (context := sizes[0] if sizes[0] > 1 else sizes[1]) > 1:
        settings |= {"parallelism.context": context, "parallelism.context_method": "all-to-all"}
    _note_offloads(keys, FSDP)


def read_activation_offload(keys: FileValues) -> None:
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


def read_megatron(keys: FileValues) -> None:
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


def read_adapters(keys: FileValues) -> None:
    """Read the adapters. FSDP keeps frozen weights as trained ones are loaded."""
    rank, alpha = keys.get(f"{MODEL}.lora_rank", 0), keys.get(f"{MODEL}.lora_alpha", 16)
    targets = keys.get(f"{MODEL}.target_modules", "all-linear")
    if rank > 0:
        keys.file.settings |= adapter_settings(rank, alpha, targets)
        is_sharded = keys.file.settings["strategy.kind"] != "megatron"
        if is_sharded and keys.get(f"{FSDP}.model_dtype", "fp32") in ("fp32", "float32"):
            keys.file.settings["training.frozen_dtype"] = "fp32"
