"""The overrides of verl's fine-tuning -> an experiment.

Read in verl b178a3cd: `trainer/fsdp_sft_trainer.py`, `trainer/config/sft_trainer.yaml`,
`utils/fsdp_utils.py`, `utils/dataset/sft_dataset.py`, which pads every sequence to `data.max_length`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zsim.errors import NotSimulatedError
from zsim.programs.verl.keys import IDLE, KEYS
from zsim.specs.formats.nested_keys import NestedKeys
from zsim.specs.formats.safe_yaml import resolve_references
from zsim.specs.formats.training_file import TrainingFile

_KINDS = {"fsdp": "fsdp1", "fsdp2": "fsdp2"}
_IDLE = (
    *IDLE, "optim", "model.trust_remote_code", "model.external_lib", "model.use_shm", "use_remove_padding",
)  # fmt: skip


def read_sft_values(name: str, data: Mapping[str, Any]) -> TrainingFile:
    """The fine-tuning that values by key say, of a command line called `name`.

    Raises InputError for values that verl refuses, NotSimulatedError for what zsim does not simulate.
    """
    file = TrainingFile(name, program="verl")
    keys = NestedKeys(file, resolve_references(data), KEYS, _IDLE)
    settings = file.settings
    strategy = keys.get("model.strategy", "fsdp2")
    if strategy not in _KINDS:
        raise NotSimulatedError(
            f"{name}: model.strategy: zsim does not simulate '{strategy}' of verl's; expected fsdp or fsdp2"
        )
    keys.read_model("model.partial_pretrain")
    keys.read("model.enable_gradient_checkpointing", "model.use_liger", "optim.clip_grad")
    keys.refuse("model.lora_adapter_path", "adapters whose rank a checkpoint says")
    keys.refuse("model.fsdp_config.wrap_policy.min_num_params", "verl's units by size")
    settings |= {
        "training.sequence_length": keys.count("data.max_length", 1024),
        "training.micro_batch_size": keys.count("data.micro_batch_size_per_gpu", 4),
        "training.precision": "bf16",
        "training.optimizer_implementation": "foreach",
        "strategy.kind": _KINDS[strategy],
        "strategy.param_dtype": "bf16",
        "strategy.reduce_dtype": "fp32",
    }
    file.global_batch_size = keys.count("data.train_batch_size", 256)
    file.defaults |= {"strategy.no_sync": False, "strategy.wrapping": "huggingface"}
    file.epochs = keys.count("trainer.total_epochs", 4)
    keys.read("model.fsdp_config.model_dtype")
    offloads = keys.get("model.fsdp_config.offload_params", False)
    if keys.get("model.fsdp_config.cpu_offload", False) and offloads:
        settings["strategy.cpu_offload"] = True
    keys.refuse("ulysses_sequence_parallel_size", "Ulysses of verl's under FSDP", 1)
    rank = keys.get("model.lora_rank", 0)
    if rank > 0:
        targets = keys.get("model.target_modules", "all-linear")
        settings |= {
            "training.lora.rank": rank,
            "training.lora.alpha": keys.get("model.lora_alpha", 16),
            "training.lora.targets": [targets]
            if targets != "all-linear" and isinstance(targets, str)
            else targets,
        }
        if strategy == "fsdp":
            file.note("adapters are units of FSDP's of their own in verl; simulated is one unit per block")
    file.note("every sequence is padded to data.max_length")
    keys.note_unread()
    return file
