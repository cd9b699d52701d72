"""The reduction of FSDP1's flat gradients: flatten, cast, reduce, keep the shard.

Transcribed from `_post_backward_hook`, `_reduce_grad` and `_reduce_grad_no_shard` of
`torch/distributed/fsdp/_runtime_utils.py`, torch 2.13.

# [Note: record_stream]
A flat gradient is allocated on one stream and read on the post-backward stream. `record_stream` keeps its
memory until the post-backward stream has read it, however far ahead the host is. Memory that is allocated on
the post-backward stream itself (casts, padding, shards) is free as soon as the host frees it.

# [Note: where gradients are flattened]
Autograd runs a node's backward on the stream of its forward. The flat parameter is split inside `unshard()`,
on the unshard stream, and that split creates its AccumulateGrad there (under NO_SHARD without a cast the
wrapping creates it earlier, which is not modelled). So the concatenation is on the unshard stream, and
`_post_backward_hook` finds that stream current ("the default computation stream or the unshard stream":
pytorch pull request 86874). The flat gradient is memory of the unshard stream, the views' gradients are
protected until it is complete, and the hook frees and records memory for the unshard stream. The next
all-gather is queued behind the concatenation, which waits for the whole backward of the unit: under
BACKWARD_POST no prefetched gather overlaps with backward. Up to torch 1.13 the split is in the forward of
`FlattenParamsWrapper`, on the compute stream.

# [Note: padding]
`F.pad` fills its result and copies into it (ATen/native/PadNd.cpp `constant_pad_nd`). Without any padding it
clones. Up to torch 1.13 `_post_backward_hook` pads every flat gradient that is sharded, and the shard is
`zeros_like`, not `empty_like` (in fully_sharded_data_parallel.py, before the file named above).

# [Note: offloading]
With `CPUOffload(offload_params=True)` shards, gradients and optimizer states are in host memory. Transcribed
from torch 2.13 `torch/distributed/fsdp/_flat_param.py` (`pre_unshard`, `init_flat_param_attributes`) and
`_runtime_utils.py` (`_offload_grad`, `_post_backward_final_callback`). The shard of a unit is copied from
pinned memory on the pre-unshard stream and cast there, even if the unit is still unsharded. A reduced
gradient is copied on the stream that computed it, and its GPU memory stays until the end of backward, when
the host waits for all copies. The copy of NO_SHARD blocks. The optimizer runs on the CPU.

Every flat parameter is in its own type, so that 4-bit weights cross PCIe packed. Their scales are attributes
of the weights that FSDP does not know, and stay where they were made, on the GPU (bitsandbytes 0.50.2
nn/modules.py `Linear4bit.quant_state`, which `fix_4bit_weight_quant_state_from_module` gives to the views).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zsim.dtypes import DTYPE_BYTES
from zsim.errors import InputError
from zsim.frameworks.fsdp1.settings import Fsdp1Config
from zsim.frameworks.fsdp1.wrapping import FlatUnit
from zsim.plan.builder import COMPUTE, PlanBuilder, move_kernels
from zsim.plan.ops import Category, Group, HostWork, Memory
from zsim.plan.shared.host_side import CPU, HostSide
from zsim.specs.strategy.training import TrainingConfig

UNSHARD, POST_BACKWARD, ALL_REDUCE = "unshard", "post_backward", "all_reduce"
VIEWS = "gradients of parameters"  # the owner of the views' gradients, until they are flattened


@dataclass
class Fsdp1UnitGradient:
    """The gradient of one flat parameter."""

    unsharded_bytes: int = 0
    """Bytes of a flat gradient that is not reduced yet."""
    is_saved: bool = False
    """Whether a reduced gradient exists, in the stored type (the rank's shard, under NO_SHARD the unsharded
    gradient).
    """


class GradientReducer:
    """Flattens and reduces the gradients of all units. They are reduce-scattered over `shard` and all-reduced
    over `replicate`, where these groups exist, and copied to `offload` if offloaded.
    """

    def __init__(
        self,
        builder: PlanBuilder,
        strategy: Fsdp1Config,
        shard: Group | None,
        replicate: Group | None,
        offload: Fsdp1OffloadedShards | None,
    ) -> None:
        self.builder = builder
        self.strategy = strategy
        self.shard, self.replicate, self.offload = shard, replicate, offload
        self.is_sharded = shard is not None
        self.split_stream = COMPUTE if strategy.before_torch_2 else UNSHARD
        self.is_hybrid = self.is_sharded and replicate is not None
        ranks = (shard.size if shard else 1) * (replicate.size if replicate else 1)
        self.predivide = predivide_factor(ranks)
        self.postdivide = ranks / self.predivide

    def flatten(self, unit: FlatUnit, gradient: Fsdp1UnitGradient) -> None:
        """Concatenate the views' gradients (the backward of the split), and add them to the gradient that
        `no_sync` accumulated: see [Note: where gradients are flattened]."""
        builder, size, stream = self.builder, unit.numel * unit.types.param_bytes, self.split_stream
        builder.wait_stream(stream, COMPUTE)
        builder.allocate("buffers", size)
        name = f"flatten gradients {unit.name}"
        done = builder.kernels(name, move_kernels(size, size), stream=stream, module=unit.path)
        views = unit.trainable_numel * unit.types.param_bytes
        if stream == COMPUTE:
            builder.free("buffers", views, owner=VIEWS)
        else:
            builder.free_when_done("buffers", views, done, owner=VIEWS)
        accumulated_bytes = gradient.unsharded_bytes
        if not self.is_sharded and gradient.is_saved:
            accumulated_bytes = unit.types.stored_bytes * unit.numel
        if accumulated_bytes:
            builder.kernels(
                f"accumulate gradients {unit.name}",
                move_kernels(accumulated_bytes + size, accumulated_bytes),
                stream=stream,
                module=unit.path,
            )
            builder.free("buffers", size)
        else:
            gradient.unsharded_bytes = size

    def reduce(self, unit: FlatUnit, gradient: Fsdp1UnitGradient) -> None:
        """The part of `_post_backward_hook` that runs on the post-backward stream."""
        builder = self.builder
        builder.host(f"reduce {unit.name}", overhead="fsdp1_reduce", module=unit.path)
        builder.wait_stream(POST_BACKWARD, self.split_stream)
        if self.is_sharded:
            self._reduce_scatter(unit, gradient)
        else:
            self._all_reduce_unsharded(unit, gradient)

    def wait(self) -> None:
        """Make the compute stream wait for all reductions. With offloading the host waits too."""
        self.builder.wait_stream(COMPUTE, POST_BACKWARD)
        if self.is_hybrid:
            self.builder.wait_stream(COMPUTE, ALL_REDUCE)
        if self.offload is not None:
            self.offload.wait((COMPUTE, POST_BACKWARD, ALL_REDUCE))

    # -- sharded strategies -----------------------------------------------------------------------------

    def _reduce_scatter(self, unit: FlatUnit, gradient: Fsdp1UnitGradient) -> None:
        builder = self.builder
        source, gradient.unsharded_bytes = gradient.unsharded_bytes, 0
        assert self.shard is not None
        ranks = self.shard.size
        builder.host(f"chunk {unit.name}", overhead="fsdp1_chunk", events=ranks)  # to learn the padding
        temporary_bytes = self._cast_pad_and_divide(unit, source)
        full = unit.padded_numel * unit.types.reduce_bytes
        shard = unit.shard_numel * unit.types.reduce_bytes
        is_gradient = unit.types.reduce == unit.types.stored and not gradient.is_saved
        shard_category: Category = "gradients" if is_gradient else "buffers"
        builder.allocate(shard_category, shard)
        event = builder.collective(
            "reduce_scatter", full, unit.types.reduce, self.shard.name, stream=POST_BACKWARD,
            name=f"reduce_scatter {unit.name}", module=unit.path,
        )  # fmt: skip
        stream = POST_BACKWARD
        if self.replicate is not None:
            stream = ALL_REDUCE
            builder.wait_stream(ALL_REDUCE, POST_BACKWARD)
            builder.collective(
                "all_reduce", shard, unit.types.reduce, self.replicate.name, stream=ALL_REDUCE,
                name=f"all_reduce {unit.name}", module=unit.path,
            )  # fmt: skip
        self._divide(unit, shard, stream)
        self._save_shard(unit, gradient, stream)
        builder.free("buffers", temporary_bytes)
        builder.free_when_done("buffers", source, event)  # see [Note: record_stream]

    def _cast_pad_and_divide(self, unit: FlatUnit, source: int) -> int:
        """Cast to the reduce dtype, pad, zero the shard, divide before the sum. Returns the allocated bytes,
        without the shard.
        """
        always_pads = self.strategy.before_torch_2 and self.is_sharded  # see [Note: padding]
        size = unit.numel * unit.types.reduce_bytes
        full = unit.padded_numel * unit.types.reduce_bytes
        traffic: list[tuple[int, int]] = []  # bytes read and written
        tensors: list[int] = []
        if size != source:
            traffic.append((source, size))
            tensors.append(size)
        if full != size:
            traffic.append((0, full))
        if full != size or always_pads:
            traffic.append((size, size))
            tensors.append(full)
        if always_pads:
            traffic.append((0, unit.shard_numel * unit.types.reduce_bytes))
        if self.predivide > 1:
            traffic.append((full, full))
        temporary_bytes = sum(tensors)
        self.builder.allocate("buffers", temporary_bytes, tensors=tuple(tensors))
        if traffic:
            read, written = map(sum, zip(*traffic, strict=True))
            self.builder.kernels(
                f"prepare gradients {unit.name}", move_kernels(read, written, launches=len(traffic)),
                stream=POST_BACKWARD, module=unit.path,
            )  # fmt: skip
        return temporary_bytes

    def _divide(self, unit: FlatUnit, size: int, stream: str) -> None:
        if self.postdivide > 1:
            self.builder.kernels(
                f"divide gradients {unit.name}", move_kernels(size, size), stream=stream, module=unit.path
            )

    def _save_shard(self, unit: FlatUnit, gradient: Fsdp1UnitGradient, stream: str) -> None:
        """_accumulate_sharded_grad: cast to the stored type, add to the shard of earlier micro-batches."""
        builder = self.builder
        shard, stored = unit.shard_numel * unit.types.reduce_bytes, unit.shard_numel * unit.types.stored_bytes
        needs_cast = unit.types.reduce != unit.types.stored
        if needs_cast:
            builder.allocate("buffers" if gradient.is_saved else "gradients", stored)
        read = (shard if needs_cast else 0) + (2 * stored if gradient.is_saved else 0)
        launches = int(needs_cast) + int(gradient.is_saved)
        if launches:
            builder.kernels(
                f"save gradients {unit.name}", move_kernels(read, launches * stored, launches=launches),
                stream=stream, module=unit.path,
            )  # fmt: skip
        freed_bytes = (shard if needs_cast or gradient.is_saved else 0) + (
            stored if needs_cast and gradient.is_saved else 0
        )
        done = builder.record(stream)
        if self.is_hybrid and done is not None:
            builder.free_when_done("buffers", freed_bytes, done)
        else:
            builder.free("buffers", freed_bytes)
        gradient.is_saved = True
        if self.offload is not None:
            self.offload.keep_gradient(unit, stored, stream)

    # -- NO_SHARD ---------------------------------------------------------------------------------------

    def _all_reduce_unsharded(self, unit: FlatUnit, gradient: Fsdp1UnitGradient) -> None:
        """_reduce_grad_no_shard: all-reduce the whole gradient, in the reduce dtype, then cast."""
        builder = self.builder
        size, stored = unit.numel * unit.types.reduce_bytes, unit.numel * unit.types.stored_bytes
        source = stored if gradient.is_saved else gradient.unsharded_bytes
        temporary_bytes = self._cast_pad_and_divide(unit, source)
        assert self.replicate is not None
        builder.collective(
            "all_reduce", size, unit.types.reduce, self.replicate.name, stream=POST_BACKWARD,
            name=f"all_reduce {unit.name}", module=unit.path,
        )  # fmt: skip
        self._divide(unit, size, POST_BACKWARD)
        if not gradient.is_saved:
            builder.allocate("gradients", stored)
        if unit.types.reduce != unit.types.stored:
            builder.kernels(
                f"save gradients {unit.name}",
                move_kernels(size, stored),
                stream=POST_BACKWARD,
                module=unit.path,
            )
        builder.free("buffers", temporary_bytes)
        if not gradient.is_saved:
            done = builder.record(POST_BACKWARD)
            assert done is not None
            if source == stored == size:
                builder.free("buffers", source)  # it is the gradient, counted as such from here on
            else:
                builder.free_when_done("buffers", source, done)
        gradient.unsharded_bytes, gradient.is_saved = 0, True
        if self.offload is not None:
            self.offload.keep_gradient(unit, stored, POST_BACKWARD, is_blocking=True)


def predivide_factor(world_size: int) -> int:
    """The factor that gradients are divided by before the sum (the rest: after it), against fp16 overflow.

    Source: `_get_gradient_predivide_factor` in torch/distributed/algorithms/_comm_hooks/default_hooks.py.
    """
    factor = 1
    while world_size % factor == 0 and world_size / factor > factor:
        factor *= 2
    return factor


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
