"""`compile.deepcompile`: what of DeepCompile is in force, and what of it is simulated.

Read in DeepSpeed 0.19.6 `compile/config.py`, `compile/init_z3.py` and `runtime/engine.py`
(`get_deepcompile_backend`).
"""

from __future__ import annotations

from collections.abc import Iterator

from zsim.errors import NotSimulatedError
from zsim.frameworks.deepspeed.settings.config import DeepCompile, DeepSpeedConfig, ZeroConfig
from zsim.frameworks.deepspeed.settings.release import Release
from zsim.frameworks.deepspeed.settings.schema import CompileBlock
from zsim.specs.strategy.parallelism import ParallelismConfig

_SINCE = (0, 19, 5)  # the first release whose passes are those of 0.19.6
_STAGE = 3
_MARGIN = 0.1  # of the GPU's memory, which no pass fills (prefetch.py `MARGIN`, selective_gather.py)
_SWITCHES = {
    "offload_activation": "DeepCompile's activations on the host",
    "offload_opt_states": "DeepCompile's optimizer states on the host",
    "offload_parameters": "DeepCompile's parameters on the host",
    "free_activation": "DeepCompile's activations that are freed early",
    "symmetric_memory": "DeepCompile's gathers from symmetric memory",
    "sync_before_reduce": "DeepCompile that waits around every call",
    "sync_after_reduce": "DeepCompile that waits around every call",
    "sync_before_allgather": "DeepCompile that waits around every call",
    "sync_after_allgather": "DeepCompile that waits around every call",
}


def deep_compile_of(block: CompileBlock | None, zero: ZeroConfig) -> DeepCompile | None:
    """DeepCompile where it is on. DeepSpeed leaves stage 0 to torch's compiler."""
    if block is None or not block.deepcompile or zero.stage == 0:
        return None
    return DeepCompile(2 if block.double_buffer else 1)


def allowed_bytes(capacity: int, context: int) -> int:
    """GPU bytes that the passes let tensors take: the capacity but for a tenth and the context."""
    return int(capacity * (1 - _MARGIN)) - context


def find_unsimulated_deep_compile(
    block: CompileBlock | None, zero: ZeroConfig, release: Release
) -> Iterator[tuple[str, str]]:
    """(key, feature) of what is not simulated."""
    if block is None or deep_compile_of(block, zero) is None:
        return
    if zero.stage != _STAGE:
        yield "compile.deepcompile", f"DeepCompile at stage {zero.stage}, only at stage 3,"
    if release.number < _SINCE:
        yield "compile.deepcompile", "DeepCompile before 0.19.5 (strategy.version)"
    extensions = {
        "MiCS": zero.is_mics,
        "hpZ": zero.zero_hpz_partition_size > 1,
        "qwZ": zero.zero_quantized_weights,
        "qgZ": zero.zero_quantized_gradients,
        "offload_optimizer": zero.offload_optimizer is not None,
        "offload_param": zero.offload_param is not None,
    }
    for name, is_on in extensions.items():
        if is_on:
            yield "compile.deepcompile", f"DeepCompile with {name}"
    for key, feature in _SWITCHES.items():
        if getattr(block, key):
            yield f"compile.{key}", feature
    if block.passes is not None:
        yield "compile.passes", "passes of DeepCompile that a file chooses"


def check_deep_compile(config: DeepSpeedConfig, parallelism: ParallelismConfig) -> None:
    """Raises NotSimulatedError for parallelism beside data parallelism."""
    if not parallelism.is_trivial:
        raise NotSimulatedError(
            f"{config.name}: compile.deepcompile: zsim does not simulate DeepCompile with model parallelism "
            "yet; expected data parallelism alone"
        )


def deep_compile_notes(where: str, deep_compile: DeepCompile | None) -> list[str]:
    if deep_compile is None:
        return []
    return [
        f"{where}: compile.deepcompile: simulated as a script runs that calls engine.compile(), after the "
        "fifth step, from which on gathers are issued ahead and parameters stay gathered as memory allows"
    ]
