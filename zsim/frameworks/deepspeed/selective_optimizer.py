"""ZenFlow's two optimizers: the selective one of every GPU, and the process that updates the rest on the CPU.

Transcribed from DeepSpeed 0.19.6 `ops/adam/zenflow_torch_adam.py`, `runtime/zenflow/zenflow_utils.py` and
`csrc/adam/cpu_adam_impl.cpp` (arXiv 2505.12242), which are so since 0.19.4. All stages have both.
"""

from __future__ import annotations

from zsim.cost.kernels.update import optimizer_kernels
from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.plan.builder import PlanBuilder
from zsim.plan.ops import Memory
from zsim.plan.shared.host_side import HostSide

_FP32 = DTYPE_BYTES["fp32"]


class SelectiveOptimizer:
    """torch's AdamW of selected 16-bit weights in place, whose two moments are in 16 bits and, with
    `offload`, in host memory.
    """

    def __init__(self, builder: PlanBuilder, config: DeepSpeedConfig) -> None:
        assert config.zero.zenflow is not None
        assert config.zero.offload_optimizer is not None
        self.builder, self.dtype = builder, config.param_dtype
        self.is_offloaded = config.zero.zenflow.offload
        self.is_pinned = config.zero.offload_optimizer.pin_memory
        self.host = HostSide(builder)

    def moments(self, numel: int) -> Memory:
        """The moments of `numel` selected elements."""
        size = 2 * DTYPE_BYTES[self.dtype] * numel
        if self.is_offloaded:
            return Memory("optimizer_states", size, "host", self.is_pinned)
        return Memory("optimizer_states", size)

    def update(self, numel: int, num_tensors: int, stream: str) -> None:
        """`group_step`, or `step`: take `numel` elements out of the weights, AdamW, and put them back."""
        builder, pinned = self.builder, self.is_pinned
        size = numel * DTYPE_BYTES[self.dtype]
        if self.is_offloaded:
            builder.allocate("buffers", 2 * size)
            self.host.copy("selected moments", "h2d", 2 * size, stream, is_pinned=pinned)
        builder.move("take selected weights", size, size, num_tensors, stream=stream)
        update = optimizer_kernels(
            numel,
            "adamw",
            "foreach",
            num_tensors=num_tensors,
            gradient_dtype=self.dtype,
            state_dtype=self.dtype,
        )
        builder.kernels("selected update", update, stream=stream)
        builder.move("put selected weights back", size, size, num_tensors, stream=stream)
        if self.is_offloaded:
            event = self.host.copy("selected moments back", "d2h", 2 * size, stream, is_pinned=pinned)
            assert event is not None
            builder.free_when_done("buffers", 2 * size, event)


class OptimizerProcess:
    """The process that updates a rank's `numel` masters while the GPU works (`overlap_step`), with the sums
    of the interval before.
    """

    def __init__(self, builder: PlanBuilder, numel: int, optimizer: str, *, is_pinned: bool) -> None:
        self.builder, self.numel, self.optimizer, self.is_pinned = builder, numel, optimizer, is_pinned
        self._updated: int | None = None

    def memory(self) -> list[Memory]:
        """A second buffer of gradients and second moments, and the snapshot of the masters."""
        size = _FP32 * self.numel
        return [
            Memory("gradients", size, "host", self.is_pinned),
            Memory("optimizer_states", 2 * size + size, "host"),
        ]

    def start(self) -> None:
        """Start the update: 28 bytes an element, and 8 for the snapshot."""
        worker = HostSide(self.builder, runs_in_other_thread=True)
        worker.optimizer("optimizer step", self.numel, self.optimizer)
        self._updated = worker.cast("copy masters", self.numel, "fp32", "fp32")

    def wait(self, host: HostSide) -> None:
        """Make the host wait for the snapshot."""
        host.wait(self._updated, "wait for the optimizer's process")
