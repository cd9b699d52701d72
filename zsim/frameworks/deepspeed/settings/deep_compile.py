"""`compile.deepcompile`: what of DeepCompile is in force, and what of it is simulated.

Read in DeepSpeed 0.19.6 and 0.19.8 `compile/config.py`, `compile/init_z3.py` and `runtime/engine.py`
(`get_deepcompile_backend`).

# [Note: DeepCompile with an optimizer on the CPU]
Stage 3 hands the CPU's optimizer its gradients in the hook of each parameter (`partition_grads`), which
`init_z3` removes. Nothing takes its place, so that the optimizer steps with gradients of zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.settings.config import DeepCompile, DeepSpeedConfig, ZeroConfig
from zsim.frameworks.deepspeed.settings.release import Release
from zsim.frameworks.deepspeed.settings.schema import CompileBlock
from zsim.specs.strategy.parallelism import ParallelismConfig

_SINCE = (0, 19, 5)  # the first release whose passes are those of 0.19.6
_MOVES_VIEWS = (0, 19, 7)  # the first release that moves views of activations as well
_STAGE = 3
# of the GPU's memory, which no pass fills (`MARGIN` of prefetch.py and offload_adam_states.py)
_MARGIN, _STATES_MARGIN = 0.1, 0.2
_MOMENTS = {
    "gathers": ", after the fifth step, from which on gathers are issued ahead and parameters stay gathered "
    "as memory allows",
    "states": ", after the first step, from which on optimizer states leave the GPU as memory requires",
    "activations": ", after the fifth step, up to which all activations leave the GPU",
}
_SWITCHES = {
    "free_activation": "DeepCompile's activations that are freed early",
    "symmetric_memory": "DeepCompile's gathers from symmetric memory",
    **dict.fromkeys(
        ("sync_before_reduce", "sync_after_reduce", "sync_before_allgather", "sync_after_allgather"),
        "DeepCompile that waits around every call",
    ),
}


def deep_compile_of(block: CompileBlock | None, zero: ZeroConfig) -> DeepCompile | None:
    """DeepCompile where it is on. DeepSpeed leaves stage 0 to torch's compiler."""
    if block is None or not block.deepcompile or zero.stage == 0:
        return None
    moves: Literal["gathers", "states", "activations", "parameters"] = "gathers"
    if zero.stage == _STAGE and block.offload_parameters:
        moves = "parameters"
    elif zero.stage == _STAGE and block.offload_opt_states:
        moves = "states"
    elif zero.stage == _STAGE and block.offload_activation:
        moves = "activations"
    return DeepCompile(2 if block.double_buffer else 1, moves, block.offload_activation_pin_memory)


def check_offloading(where: str, block: CompileBlock | None, zero: ZeroConfig) -> None:
    """Raises InputError for what `init_z3` refuses: two targets of offloading."""
    if block is None or deep_compile_of(block, zero) is None or zero.stage != _STAGE:
        return
    targets = {
        "compile.offload_opt_states": block.offload_opt_states,
        "compile.offload_activation": block.offload_activation,
        "compile.offload_parameters": block.offload_parameters,
        "zero_optimization.offload_optimizer": block.offload_opt_states
        and zero.offload_optimizer is not None,
    }
    names = [name for name, is_on in targets.items() if is_on]
    if len(names) > 1:
        raise InputError(f"{where}: {names[0]}: found with {names[1]}, which DeepSpeed refuses; expected one")


def allowed_bytes(deep_compile: DeepCompile, capacity: int, context: int) -> int:
    """GPU bytes that the passes let tensors take: the capacity but for a tenth (a fifth where optimizer
    states leave) and the context."""
    margin = _STATES_MARGIN if deep_compile.moves == "states" else _MARGIN
    return int(capacity * (1 - margin)) - context


def find_unsimulated_deep_compile(
    block: CompileBlock | None, zero: ZeroConfig, release: Release
) -> Iterator[tuple[str, str]]:
    """(key, feature) of what is not simulated."""
    if block is not None and block.autoep_non_moe:
        yield "compile.autoep_non_moe", "torch's compiler around AutoEP's layers"
    if block is None or deep_compile_of(block, zero) is None:
        return
    if release.number < _SINCE:
        yield "compile.deepcompile", "DeepCompile before 0.19.5 (strategy.version)"
    extensions = {
        "MiCS": zero.is_mics,
        "hpZ": zero.zero_hpz_partition_size > 1,
        "qwZ": zero.zero_quantized_weights,
        "qgZ": zero.zero_quantized_gradients,
        "offload_optimizer, whose gradients no release hands over,": zero.offload_optimizer is not None,
        "offload_param on NVMe": zero.offload_param is not None and zero.offload_param.device == "nvme",
        "offload_param and without compile.offload_parameters": zero.offload_param is not None
        and not block.offload_parameters,
    }
    for name, is_on in extensions.items():
        if is_on:
            yield "compile.deepcompile", f"DeepCompile with {name}"
    if zero.stage == _STAGE and block.offload_activation and release.number < _MOVES_VIEWS:
        yield "compile.offload_activation", "DeepCompile's activations on the host before 0.19.7"
    for key, feature in _SWITCHES.items():
        if getattr(block, key):
            yield f"compile.{key}", feature
    if block.passes is not None:
        yield "compile.passes", "passes of DeepCompile that a file chooses"


def check_deep_compile(config: DeepSpeedConfig, parallelism: ParallelismConfig) -> None:
    """Raises NotSimulatedError for parallelism beside data parallelism, Muon before stage 3, and optimizers
    that are not ZeRO's own class.
    """
    where = f"{config.name}: compile.deepcompile: zsim does not simulate DeepCompile with"
    if config.optimizer.name == "muon" and config.stage < _STAGE:
        raise NotSimulatedError(f"{where} Muon before stage 3 yet; expected stage 3, or another optimizer")
    if config.optimizer_wrapper not in ("zero12", "zero3"):
        raise NotSimulatedError(
            f"{where} {config.optimizer_wrapper}, which DeepSpeed takes here; expected stage 2 or 3, or "
            "data_types.grad_accum_dtype as the weights"
        )
    block = config.activation_checkpointing
    if config.deep_compile is not None and config.deep_compile.moves == "activations":
        for key in ("partition_activations", "cpu_checkpointing", "synchronize_checkpoint_boundary"):
            if getattr(block, key):
                raise NotSimulatedError(
                    f"{where} compile.offload_activation beside {key}; expected one of them"
                )
    if not parallelism.is_trivial:
        raise NotSimulatedError(f"{where} model parallelism yet; expected data parallelism alone")


def deep_compile_notes(where: str, block: CompileBlock | None, zero: ZeroConfig) -> list[str]:
    deep_compile = deep_compile_of(block, zero)
    if block is None or deep_compile is None:
        return []
    notes = [
        f"{where}: compile.{key}: no effect before stage 3, whose passes alone move it"
        for key in ("offload_opt_states", "offload_activation", "offload_parameters")
        if zero.stage < _STAGE and getattr(block, key)
    ]
    if deep_compile.moves != "activations" and not block.offload_activation_pin_memory:
        notes.append(
            f"{where}: compile.offload_activation_pin_memory: no effect, as compile.offload_activation moves "
            "no activations"
        )
    if deep_compile.moves == "parameters":
        notes.append(
            f"{where}: compile.offload_parameters: moves no parameter that offload_param has not put into "
            "host memory, and takes the place of the passes that issue gathers ahead"
        )
    moment = _MOMENTS.get(deep_compile.moves, "") if zero.stage == _STAGE else ""
    return [
        *notes,
        f"{where}: compile.deepcompile: simulated as a script runs that calls engine.compile(){moment}",
    ]
