"""1-bit Adam, 1-bit LAMB and 0/1 Adam: the keys of `optimizer.params`, and the phases of their steps.

Read in DeepSpeed 0.19.6 `runtime/fp16/onebit/{adam,lamb,zoadam}.py` (arXiv 2102.02888, 2104.06069,
2202.06009), which 0.19.7 removed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.settings.json_types import Count, JsonBlock
from zsim.frameworks.deepspeed.settings.reader import Reading
from zsim.frameworks.deepspeed.settings.schema import OptimizerBlock
from zsim.specs.messages import raise_input_error

OneBitPhase = Literal["full", "compressed", "local"]


class _OneBitParams(JsonBlock):
    """The keys that all three take."""

    lr: Any = None
    betas: Any = None
    eps: Any = None
    weight_decay: Any = 0.0
    bias_correction: bool = True
    eps_inside_sqrt: bool = False
    amsgrad: bool = False
    cuda_aware: bool = False
    comm_backend_name: Literal["nccl", "mpi", "hccl", "compressed"] = "nccl"


class OneBitAdamParams(_OneBitParams):
    freeze_step: Count = 100_000


class OneBitLambParams(_OneBitParams):
    freeze_step: Count = 100_000
    max_coeff: Any = None
    min_coeff: Any = None
    coeff_beta: Any = None
    factor_max: Any = None
    factor_min: Any = None
    factor_threshold: Any = None


class ZeroOneAdamParams(_OneBitParams):
    var_freeze_step: Count = 100_000
    var_update_scaler: Count = 16
    local_step_scaler: Count = 32_678
    local_step_clipper: Count = 16


_PARAMS: dict[str, type[_OneBitParams]] = {
    "onebitadam": OneBitAdamParams,
    "onebitlamb": OneBitLambParams,
    "zerooneadam": ZeroOneAdamParams,
}
ONE_BIT_OPTIMIZERS = tuple(_PARAMS)


@dataclass(frozen=True, slots=True)
class OneBit:
    """The simulated step of one of the three optimizers."""

    name: str
    """DeepSpeed's lower-case name."""
    phase: OneBitPhase
    """All-reduces gradients in full, all-reduces signs, or does not communicate."""
    step: int
    """The simulated step, from 1 on."""
    is_frozen: bool
    """The variance is not updated any more."""
    decays_weights: bool

    @property
    def has_errors(self) -> bool:
        """Whether the two error buffers exist. 0/1 Adam makes them in its first step."""
        return self.is_frozen or self.name == "zerooneadam"


def resolve_one_bit(reading: Reading, wrapper: str, step: int | None) -> tuple[OneBit | None, list[str]]:
    """The simulated step of one of the three optimizers, and a note on it. None for any other optimizer.

    Raises InputError for what DeepSpeed refuses, and NotSimulatedError for another backend than NCCL's and
    for BF16_Optimizer, whose ranks have different shards.
    """
    block = reading.file.optimizer
    name = "" if block is None or block.type is None else block.type.lower()
    if block is None or name not in _PARAMS:
        if step is not None:
            raise InputError(
                f"strategy.optimizer_step: found {step}, but the steps of {reading.where}'s optimizer are "
                "all alike; expected optimizer.type OneBitAdam, OneBitLamb or ZeroOneAdam, or none"
            )
        return None, []
    where = f"{reading.where}: optimizer"
    try:
        params = _PARAMS[name].model_validate(block.params)
    except ValidationError as error:
        raise_input_error(error, f"{where}.params", _PARAMS[name])
    _check(where, block, params)
    if wrapper == "bf16_optimizer":
        raise NotSimulatedError(
            f"{where}.type: zsim does not simulate '{block.type}' in BF16_Optimizer, whose ranks have "
            "different shards; expected fp16, or strategy.version '0.17.6' to '0.19.6'"
        )
    one_bit = one_bit_step(name, params, step)
    return one_bit, [_note(reading.where, params, one_bit)]


def _check(where: str, block: OptimizerBlock, params: _OneBitParams) -> None:
    if params.amsgrad:
        raise InputError(f"{where}.params.amsgrad: {block.type} has no AMSGrad; expected false")
    if params.comm_backend_name != "nccl":
        raise NotSimulatedError(
            f"{where}.params.comm_backend_name: zsim does not simulate '{params.comm_backend_name}', which "
            "is for MPI, Ascend or Intel; expected 'nccl'"
        )
    if block.legacy_fusion and not isinstance(params, OneBitLambParams):
        raise InputError(
            f"{where}.legacy_fusion: found true, but {block.type}.step takes no scale and fails; expected it "
            "left out"
        )


def one_bit_step(name: str, params: _OneBitParams, step: int | None) -> OneBit:
    """The work of `step` (from 1 on). None stands for the first step of the last phase that communicates.

    DeepSpeed's own count is one ahead, since the optimizer's states are made by a first empty step
    (`initialize_optimizer_states`).
    """
    decays = isinstance(params.weight_decay, int | float) and params.weight_decay > 0
    if isinstance(params, ZeroOneAdamParams):
        number = step or _last_interval(params)
        phase, is_frozen = _zero_one_phase(params, number)
        return OneBit(name, phase, number, is_frozen, decays)
    assert isinstance(params, OneBitAdamParams | OneBitLambParams)
    number = step or params.freeze_step
    is_frozen = number >= params.freeze_step
    return OneBit(name, "compressed" if is_frozen else "full", number, is_frozen, decays)


def _last_interval(params: ZeroOneAdamParams) -> int:
    """The first step that communicates once local steps have their longest interval."""
    interval, local_steps = 1, 0
    while interval < params.local_step_clipper:
        interval, local_steps = (
            min(params.local_step_clipper, 2 * interval),
            local_steps + params.local_step_scaler,
        )
    number = params.var_freeze_step + local_steps + 1
    return -(-(number + 1) // interval) * interval - 1


def _zero_one_phase(params: ZeroOneAdamParams, step: int) -> tuple[OneBitPhase, bool]:
    """(phase, whether the variance is frozen) of a step of 0/1 Adam.

    The variance is updated, from gradients reduced in full, every `interval` steps, which doubles after
    every `var_update_scaler` updates. Other steps reduce signs of gradients. Past `var_freeze_step` steps
    are local but for one in an interval that doubles every `local_step_scaler` steps.
    """
    count = step + 1
    if count <= params.var_freeze_step + 1:
        interval, updates, number = 1, 0, 2
        while number < count:
            updates += 1
            if updates == params.var_update_scaler:
                updates, interval = 0, 2 * interval
            number = (number // interval + 1) * interval
        return ("full" if count % interval == 0 else "compressed"), False
    interval = _local_interval(params, count)
    return ("compressed" if count % interval == 0 else "local"), True


def _local_interval(params: ZeroOneAdamParams, count: int) -> int:
    doublings = (count - params.var_freeze_step - 2) // params.local_step_scaler
    interval = 1
    while doublings and interval < params.local_step_clipper:
        doublings, interval = doublings - 1, min(params.local_step_clipper, 2 * interval)
    return interval


def _note(where: str, params: _OneBitParams, one_bit: OneBit) -> str:
    """A sentence on the simulated step, and on how to ask for another."""
    work = {
        "full": "reduces gradients in full",
        "compressed": "reduces signs",
        "local": "reduces nothing",
    }[one_bit.phase]
    note = f"{where}: optimizer.type: step {one_bit.step:,} is simulated, which {work}"
    if isinstance(params, ZeroOneAdamParams):
        interval = _local_interval(params, one_bit.step + 1) if one_bit.is_frozen else 1
        share = f", as one in {interval} does by then and others reduce nothing" if interval > 1 else ""
        return f"{note}{share}; strategy.optimizer_step asks for another"
    assert isinstance(params, OneBitAdamParams | OneBitLambParams)
    return (
        f"{note}; gradients are reduced in full before step {params.freeze_step:,} (freeze_step), signs from "
        "it on; strategy.optimizer_step asks for another"
    )
