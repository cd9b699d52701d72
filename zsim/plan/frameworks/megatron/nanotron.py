"""nanotron's data parallelism: fp32 sums of 16-bit gradients, with torch's DDP or without, and its ZeRO-1.

Transcribed from nanotron of January 2025 (9055c664): `trainer.py`, `helpers.py`,
`optim/gradient_accumulator.py`, `optim/zero.py`, `optim/clip_grads.py`, `distributed.py`.

# [Note: who reduces]
autograd leaves the gradients of a micro-batch in `.grad`. After its complete backward they are added, tensor
by tensor, to one fp32 buffer. With ZeRO-1 the model is not wrapped in DDP: after the last backward the
complete buffer is all-reduced, and nothing is computed meanwhile. Without ZeRO the last backward goes through
DDP, whose hook adds a bucket's gradients to the buffer and all-reduces them there, concurrently with
backward. DDP copies gradients into its buckets and back.

# [Note: pieces]
ZeRO-1 cuts every parameter into a piece per rank. `all_gather_coalesced` joins a rank's pieces, gathers them
at once, and copies ranks x parameters pieces back, each a kernel after Python's slicing. torch's
`ProcessGroupNCCL` gathers into a tensor of its own, which it copies out rank by rank.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.cost.kernels.update import accumulate_kernels, cat_launches, norm_kernels, scale_kernels
from zsim.cost.optimizers.tensors import Updated
from zsim.plan.builder import COMPUTE, moves
from zsim.plan.frameworks.megatron.buffer import Bucket
from zsim.plan.frameworks.megatron.schedule import NCCL, MegatronSchedule
from zsim.plan.ops import Memory
from zsim.plan.parts.optimizer import update
from zsim.plan.stage import Stage
from zsim.plan.workload.workload import ModuleCall
from zsim.specs.strategy.megatron import Megatron


class NanotronSchedule(MegatronSchedule):
    """See the module's notes."""

    def __init__(self, stage: Stage, strategy: Megatron) -> None:
        super().__init__(stage, strategy)
        self._tied_bytes = 0
        self._held = 0  # bytes of the gradients in `.grad`
        self._wraps = not strategy.distributed_optimizer and self.ranks > 1

    @property
    def _syncs(self) -> bool:
        """Whether DDP reduces in this backward."""
        return self._wraps and self._is_last

    @property
    def own_numels(self) -> list[int]:
        ranks = self.ranks if self.strategy.distributed_optimizer else 1
        return [-(-numel // ranks) for numel in self._numels.values()]

    def resident(self) -> list[Memory]:
        found = super().resident()
        if self._wraps:
            found.append(Memory("buffers", sum(self._numels.values()) * self.param_bytes))  # DDP's buckets
        return found

    # -- gradients --------------------------------------------------------------------------------------

    def gradient_ready(self, call: ModuleCall) -> None:
        builder = self.builder
        if call.borrowed_gradient_numel:
            self._tied_bytes = call.borrowed_numel * self.param_bytes
            self._hold(self._tied_bytes)
        for parameter in reversed(call.trainable_parameters):
            size = parameter.numel * self.param_bytes
            if self._tied_bytes and size == self._tied_bytes:
                dtype = self.strategy.param_dtype
                kernels = accumulate_kernels(parameter.numel, dtype, dtype)
                builder.kernels(f"add tied gradient {call.name}", kernels, module=call.name)
                self._tied_bytes = 0
            else:
                self._hold(size)
            if self._syncs:
                builder.move(f"copy gradient {call.name}", size, size, module=call.name)
                bucket = self._bucket_of[call.parameter_name(parameter)]
                self._missing[bucket.number] -= 1
                if not self._missing[bucket.number]:
                    self._hook(bucket)

    def _hold(self, size: int) -> None:
        self._held += size
        self.builder.allocate("gradients", size)

    def _hook(self, bucket: Bucket) -> None:
        """fp32_accum_hook: add a bucket of DDP's to the buffer and all-reduce it there."""
        self._add("add bucket", bucket.numel, len(bucket.names))
        self._reduce(bucket, NCCL)

    def _add(self, name: str, numel: int, tensors: int) -> None:
        kernels = accumulate_kernels(numel, self.strategy.grad_dtype, self.strategy.param_dtype)
        each = [replace(kernel, launches=tensors) for kernel in kernels]
        self.builder.kernels(name, each, overhead="megatron_gradient_hook", events=tensors)

    def end_backward(self) -> None:
        """GradientAccumulator.backward: sums tensor by tensor, or with DDP copies out of its buckets."""
        if not self._numels:  # a stage of the loss alone
            return
        if self._syncs:
            self.builder.kernels(
                "copy buckets back", moves(self._held, self._held, launches=len(self._numels))
            )
        else:
            self._add("add gradients", sum(self._numels.values()), len(self._numels))
        self.builder.free("gradients", self._held)
        self._held = 0

    # -- step -------------------------------------------------------------------------------------------

    def optimizer_step(self) -> None:
        """The norm over all gradients, which every rank has, clipping without a look at it, the update of the
        rank's pieces."""
        builder, training = self.builder, self.training
        numels = [numel for chunk in self.chunks for numel in chunk._numels.values()]
        if training.gradient_clipping > 0:
            norms = norm_kernels(sum(numels), "fp32", len(numels))
            builder.kernels("gradient norm", [replace(one, launches=2 * len(numels) + 2) for one in norms])
            for group in self.stage.norm_groups():
                builder.collective(
                    "all_reduce", 4, "fp32", group, stream=COMPUTE, name="all_reduce gradient norm"
                )
            scales = scale_kernels(sum(numels), "fp32", len(numels))
            builder.kernels("clip gradients", [replace(one, launches=len(numels)) for one in scales])
        own = [numel for chunk in self.chunks for numel in chunk.own_numels]
        update(
            builder,
            training,
            Updated.flat(own),
            gradient_dtype="fp32",
            state_dtype="fp32",
            low_precision_copy=self.strategy.param_dtype != "fp32",
        )
        for chunk in self.chunks:
            chunk.finish_update()

    def finish_update(self) -> None:
        """Run `_all_gather_params`. See [Note: pieces]."""
        if not self.strategy.distributed_optimizer or self.ranks == 1 or not self._numels:
            return
        builder, ranks, tensors = self.builder, self.ranks, len(self._numels)
        own = sum(self.own_numels) * self.param_bytes
        size = own * ranks
        builder.host("cut parameters", overhead="nanotron_piece", events=ranks * tensors)
        builder.allocate("buffers", own + size)
        builder.kernels("join own pieces", moves(own, own, launches=cat_launches(tensors)))
        builder.kernels("join pieces", moves(size, size, launches=ranks * cat_launches(tensors)))
        builder.allocate("buffers", size)
        builder.collective(
            "all_gather", size, self.strategy.param_dtype, self.shard.name, stream=COMPUTE,
            name="all_gather parameters",
        )  # fmt: skip
        builder.kernels("copy out of the gathered", moves(size, size, launches=ranks))
        builder.free("buffers", size)
        builder.kernels("copy pieces back", moves(size, size, launches=ranks * tensors))
        builder.free("buffers", own + size)
