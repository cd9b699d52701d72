"""ZeRO-Offload's one-step delayed parameter update, which is the paper's and in no DeepSpeed release."""

from __future__ import annotations

from dataclasses import replace

from zsim.errors import InputError
from zsim.specs.strategy.deepspeed.config import DeepSpeedConfig

_NOTE = (
    "delayed parameter update: the CPU updates with the gradients of the step before, during forward and "
    "backward (ZeRO-Offload, section 5.2); no DeepSpeed release has it (DeepSpeed issue 1260)"
)


def with_delayed_update(config: DeepSpeedConfig) -> DeepSpeedConfig:
    """The same with the CPU's update one step late.

    Raises InputError where there is no update on the CPU, or a stage that the paper does not describe.
    """
    offload = config.zero.offload_optimizer
    if config.stage not in (1, 2) or offload is None:
        found = f"stage {config.stage}" + ("" if offload else " without offload_optimizer")
        raise InputError(
            f"strategy.delayed_parameter_update: found {found}; expected stage 1 or 2 with offload_optimizer "
            "on the CPU"
        )
    return replace(config, delayed_parameter_update=True, notes=(*config.notes, _NOTE))
