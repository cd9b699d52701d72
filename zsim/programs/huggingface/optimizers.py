"""Names of optimizers in transformers' `optim` (5.23 training_args.py `OptimizerNames`) -> zsim's.

axolotl, LLaMA-Factory and ms-swift pass these names on, and add some of their own.
"""

from __future__ import annotations

from collections.abc import Mapping

from zsim.errors import did_you_mean
from zsim.frameworks.deepspeed.settings.text import load_object
from zsim.specs.formats.config_file import TrainingFile
from zsim.specs.formats.file_values import FileValues

# name -> (training.optimizer, training.optimizer_implementation)
OPTIMIZERS: Mapping[str, tuple[str, str]] = {
    "adamw_torch": ("adamw", "foreach"),
    "adamw_torch_fused": ("adamw", "fused"),
    "adamw_apex_fused": ("adamw", "fused"),
    "adamw_hf": ("adamw", "for_loop"),
    "adamw_8bit": ("adamw-8bit", "fused"),
    "adamw_bnb_8bit": ("adamw-8bit", "fused"),
    "paged_adamw": ("paged-adamw", "fused"),
    "paged_adamw_32bit": ("paged-adamw", "fused"),
    "paged_adamw_8bit": ("paged-adamw-8bit", "fused"),
    "lion_8bit": ("lion-8bit", "fused"),
    "adamw_torch_8bit": ("adamw-8bit-torchao", "fused"),
    "adamw_torch_4bit": ("adamw-4bit-torchao", "fused"),
    "adafactor": ("adafactor-transformers", "fused"),
    "sgd": ("sgd", "foreach"),
}
# Those that keep or compute something else, by the beginning of their name.
_REFUSED: Mapping[str, str] = {
    "galore": "GaLore, which projects gradients onto bases that an SVD renews",
    "q_galore": "Q-GaLore, which projects gradients onto bases that an SVD renews",
    "apollo": "APOLLO, which scales gradients by a random projection of them",
    "lomo": "LOMO, which updates weights within backward",
    "adalomo": "AdaLOMO, which updates weights within backward",
    "ademamix": "AdEMAMix, which keeps three states",
    "paged_ademamix": "AdEMAMix, which keeps three states",
    "paged_lion": "bitsandbytes' paged Lion",
    "lion": "bitsandbytes' Lion in 32 bits",
    "rmsprop": "RMSprop",
    "adagrad": "Adagrad of torch",
    "grokadamw": "GrokAdamW",
    "schedule_free": "schedule-free optimizers, which keep a second copy of the weights",
    "stable_adamw": "StableAdamW",
    "adamw_anyprecision": "AnyPrecisionAdamW",
    "adamw_torch_xla": "optimizers of XLA",
    "adamw_torch_npu": "optimizers of NPUs",
    "optimi": "optimi's AdamW with Kahan summation",
    "adopt": "ADOPT",
    "came": "CAME",
    "dion": "Dion",
    "sinkgd": "SinkGD",
    "flash_": "FlashOptim",
    "bcos": "an optimizer of that name",
}
DEFAULT = "adamw_torch_fused"  # with torch 2.8 and later


def read_optimizer(values: FileValues, key: str, extra: Mapping[str, tuple[str, str]] | None = None) -> None:
    """Write the optimizer that a file names at `key`. `extra` are names of the program's own.

    Raises NotSimulatedError for optimizers that zsim lacks, InputError for a name that nobody has.
    """
    names = {**OPTIMIZERS, **(extra or {})}
    name = str(values.get(key, DEFAULT)).lower()
    if name not in names:
        for beginning, feature in _REFUSED.items():
            if name.startswith(beginning):
                raise values.lack(key, f"{feature}; expected one of {', '.join(names)}")
        raise values.error(key, f"one of {', '.join(names)}{did_you_mean(name, names)}")
    optimizer, implementation = names[name]
    if optimizer != "adamw":
        values.file.settings["training.optimizer"] = optimizer
    elif values.has(key):
        values.put("training.optimizer", optimizer, key)
    if implementation != "fused" and values.file.settings.get("strategy.kind") != "deepspeed":
        values.put("training.optimizer_implementation", implementation, key)
    allow_optimizer(values.file)


def allow_optimizer(file: TrainingFile) -> None:
    """Let DeepSpeed take an optimizer that is no JSON's, as the Trainer and Accelerate do.

    accelerate 1.15.0 accelerator.py `_prepare_deepspeed` and transformers 5.23 integrations/deepspeed.py
    `deepspeed_optim_sched` write `zero_allow_untested_optimizer` where the JSON has no optimizer. Where it
    has one, `optim` has no effect.
    """
    settings = file.settings
    optimizer = settings.get("training.optimizer", "adamw")
    if settings.get("strategy.kind") != "deepspeed" or optimizer == "adamw":
        return
    name, data = load_object(settings["strategy.config"], settings.get("strategy.config_name"))
    if "optimizer" in data:
        del settings["training.optimizer"]
        file.note(f"the optimizer is the one that {name} says; '{optimizer}' has no effect")
        return
    zero = data.get("zero_optimization")
    offload = zero.get("offload_optimizer") if isinstance(zero, Mapping) else None
    device = offload.get("device", "none") if isinstance(offload, Mapping) else "none"
    if device != "none" and data.get("zero_force_ds_cpu_optimizer", True) and "lion" not in optimizer:
        # accelerate 1.15.0 utils/deepspeed.py `map_pytorch_optim_to_deepspeed`
        settings["training.optimizer"] = "adam"
        file.note(
            f"optimizer: '{optimizer}' becomes DeepSpeedCPUAdam, since {name} keeps optimizer states on the "
            f"host"
        )
        return
    settings["strategy.config_name"] = name
    settings["strategy.config"] = {**data, "zero_allow_untested_optimizer": True}
