"""FSDP1 with `CPUOffload(offload_params=True)`: shards, gradients and optimizer states in host memory.

Transcribed from torch 2.13 `torch/distributed/fsdp/_flat_param.py` (`pre_unshard`,
`init_flat_param_attributes`) and `_runtime_utils.py` (`_offload_grad`, `_post_backward_final_callback`). The
shard of a unit is copied from pinned memory on the pre-unshard stream and cast there, even if the unit is
still unsharded. A reduced gradient is copied on the stream that computed it, and its GPU memory stays until
the end of backward, when the host waits for all copies. The copy of NO_SHARD blocks. The optimizer runs on
the CPU.

Every flat parameter is in its own type, so that 4-bit weights cross PCIe packed. Their scales are attributes
of the weights that FSDP does not know, and stay where they were made, on the GPU (bitsandbytes 0.50.2
nn/modules.py `Linear4bit.quant_state`, which `fix_4bit_weight_quant_state_from_module` gives to the views).
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.dtypes import DTYPE_BYTES
from zsim.errors import InputError
from zsim.frameworks.fsdp1.settings import Fsdp1Config
from zsim.frameworks.fsdp1.wrapping import FlatUnit
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.ops import HostWork, Memory
from zsim.plan.shared.host_side import CPU, HostSide
from zsim.specs.strategy.training import TrainingConfig

_NORM_BYTES = 4  # forced to fp32


def check_accumulation(strategy: Fsdp1Config, training: TrainingConfig) -> None:
    """Raise InputError where FSDP1 would lose gradients: of gradients reduced in several micro-batches it
    keeps only the newest (torch's documentation of `CPUOffload`)."""
    if training.gradient_accumulation_steps > 1 and not strategy.no_sync:
        raise InputError(
            "strategy.no_sync: FSDP1 with cpu_offload keeps only the newest reduced gradient; expected "
            "no_sync = true with gradient_accumulation_steps above 1"
        )


class Fsdp1OffloadedShards:
    """Keeps every unit's shard, gradient and optimizer states in host memory. Frozen units have memory for
    gradients, too (`init_flat_param_attributes` allocates it for all).
    """

    def __init__(self, builder: PlanBuilder, units: Sequence[FlatUnit], training: TrainingConfig) -> None:
        self.builder, self.training = builder, training
        self.host = HostSide(builder)
        self.units = units
        self.trained_units = [unit for unit in units if unit.trainable_numel]

    def resident(self, states: Memory) -> list[Memory]:
        """Parameters and gradients in pinned memory, both allocated from the start, the optimizer's `states`,
        and on the GPU the scales of 4-bit weights.
        """
        total = sum(unit.stored_shard_bytes for unit in self.units)
        scales = sum(unit.scale_bytes for unit in self.units)
        resident = [
            Memory("parameters", total, "host", is_pinned=True),
            Memory("gradients", total, "host", is_pinned=True),
            Memory("optimizer_states", states.bytes, "host"),
            Memory("parameters", scales),
        ]
        return [memory for memory in resident if memory.bytes]

    def bring(self, unit: FlatUnit, stream: str) -> int:
        """Copy a unit's shard to the GPU and return the copy's event."""
        size = unit.stored_shard_bytes
        self.builder.allocate("buffers", size)
        event = self.host.copy(f"shard of {unit.name}", "h2d", size, stream, module=unit.path)
        assert event is not None
        return event

    def drop(self, unit: FlatUnit, last_use: int) -> None:
        """Free the shard on the GPU, which is not needed after event `last_use`."""
        self.builder.free_when_done("buffers", unit.stored_shard_bytes, last_use)

    def keep_gradient(self, unit: FlatUnit, size: int, stream: str, *, is_blocking: bool = False) -> None:
        """Copy a reduced gradient of `size` bytes to host memory. Its GPU memory stays until `wait`."""
        name = f"gradients {unit.name} to host"
        self.host.copy(name, "d2h", size, stream, is_blocking=is_blocking, module=unit.path)

    def wait(self, streams: Sequence[str]) -> None:
        """Make the host wait for all reductions and copies on `streams`. `_finalize_params` frees the
        gradients on the GPU.
        """
        for stream in streams:
            self.builder.host_wait(self.builder.record(stream))
        self.builder.host("gradients in host memory")
        self.builder.free("gradients", sum(unit.stored_shard_bytes for unit in self.trained_units))

    def step(self, shard: str | None) -> None:
        """Run torch's AdamW on the CPU.

        Clipping reads and scales the gradients there too, and sums their norms over the group `shard` on the
        GPU (torch 2.13 fully_sharded_data_parallel.py `_get_grad_norm` moves the norm to the compute device,
        `clip_grad_norm_` reduces it and moves it back). `shard` is None under NO_SHARD, whose norms are
        identical on all ranks.
        """
        training, numels = self.training, self._trained_numels()
        if training.gradient_clipping > 0:
            for dtype, numel in numels.items():
                norm = HostWork("copy", DTYPE_BYTES[dtype] * numel, numel)
                self.builder.host_wait(self.builder.add("gradient norm", CPU, norm))
            if shard is not None:
                self.host.copy("gradient norm to GPU", "h2d", _NORM_BYTES, COMPUTE, is_pinned=False)
                self.builder.collective(
                    "all_reduce", _NORM_BYTES, "fp32", shard, stream=COMPUTE, name="all_reduce gradient norm"
                )
                self.host.copy("gradient norm to host", "d2h", _NORM_BYTES, COMPUTE, is_pinned=False)
            for dtype, numel in numels.items():
                self.host.scale("clip gradients", numel, dtype)
        for dtype, numel in numels.items():
            implementation = training.optimizer_implementation
            self.host.optimizer("optimizer step", numel, training.optimizer, implementation, dtype)
        self.builder.host("end of step")

    def _trained_numels(self) -> dict[str, int]:
        """Elements of this rank that are updated, by their type."""
        numels: dict[str, int] = {}
        for unit in self.trained_units:
            numels[unit.types.stored] = numels.get(unit.types.stored, 0) + unit.trained_shard_numel
        return numels
