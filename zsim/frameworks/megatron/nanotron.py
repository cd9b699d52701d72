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

# [Note: nanotron's pipelines]
The engines' steps are for blocks that pass one tensor on. Source: nanotron (commit 2411b022)
`src/nanotron/parallel/pipeline_parallel/`: `engine.py`, `run_communication` of `state.py`, `send_tensors` and
`recv_tensors` of `p2p.py`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from zsim.cost.kernels.update import accumulate_kernels, cat_launches, norm_kernels, scale_kernels
from zsim.cost.optimizers import UpdatedTensor
from zsim.frameworks.megatron.buffer import Bucket
from zsim.frameworks.megatron.schedule import NCCL, MegatronSchedule
from zsim.frameworks.megatron.settings.config import MegatronConfig
from zsim.plan.actions import Action, Kind, MessageCall, Step
from zsim.plan.builder import COMPUTE, move_kernels
from zsim.plan.ops import Memory
from zsim.plan.pipeline.lowering import check_micro_batches
from zsim.plan.pipeline.run_actions import PipelineRuntime
from zsim.plan.shared.optimizer import update
from zsim.plan.stage import Stage
from zsim.plan.workload.workload import ModuleCall


class NanotronSchedule(MegatronSchedule):
    """See the module's notes."""

    def __init__(self, stage: Stage, strategy: MegatronConfig) -> None:
        super().__init__(stage, strategy)
        self._tied_bytes = 0
        self._gradient_bytes = 0  # bytes of the gradients in `.grad`
        self._wraps = not strategy.distributed_optimizer and self.ranks > 1

    def action_state(self, micro_batch: int) -> Hashable | None:
        state = super().action_state(micro_batch)
        return None if state is None else (state, self._tied_bytes, self._gradient_bytes)

    @property
    def _syncs(self) -> bool:
        """Whether DDP reduces in this backward."""
        return self._wraps and self._is_last

    @property
    def own_numels(self) -> list[int]:
        ranks = self.ranks if self.strategy.distributed_optimizer else 1
        return [-(-numel // ranks) for numel in self._numels.values()]

    def resident(self) -> list[Memory]:
        memories = super().resident()
        if self._wraps:
            memories.append(Memory("buffers", sum(self._numels.values()) * self.param_bytes))  # DDP's buckets
        return memories

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
        self._gradient_bytes += size
        self.builder.allocate("gradients", size)

    def _hook(self, bucket: Bucket) -> None:
        """fp32_accum_hook: add a bucket of DDP's to the buffer and all-reduce it there."""
        self._add("add bucket", bucket.numel, len(bucket.names))
        self._reduce(bucket, NCCL)

    def _add(self, name: str, numel: int, num_tensors: int) -> None:
        kernels = accumulate_kernels(numel, self.strategy.grad_dtype, self.strategy.param_dtype)
        repeated_kernels = [replace(kernel, launches=num_tensors) for kernel in kernels]
        self.builder.kernels(name, repeated_kernels, overhead="megatron_gradient_hook", events=num_tensors)

    def end_backward(self) -> None:
        """GradientAccumulator.backward: sums tensor by tensor, or with DDP copies out of its buckets."""
        if not self._numels:  # a stage of the loss alone
            return
        if self._syncs:
            self.builder.kernels(
                "copy buckets back",
                move_kernels(self._gradient_bytes, self._gradient_bytes, launches=len(self._numels)),
            )
        else:
            self._add("add gradients", sum(self._numels.values()), len(self._numels))
        self.builder.free("gradients", self._gradient_bytes)
        self._gradient_bytes = 0

    # -- step -------------------------------------------------------------------------------------------

    def optimizer_step(self) -> None:
        """The norm over all gradients, which every rank has, clipping without a look at it, the update of the
        rank's pieces."""
        builder, training = self.builder, self.training
        numels = [numel for chunk in self.stage_hooks for numel in chunk._numels.values()]
        if training.gradient_clipping > 0:
            norms = norm_kernels(sum(numels), "fp32", len(numels))
            builder.kernels(
                "gradient norm", [replace(kernel, launches=2 * len(numels) + 2) for kernel in norms]
            )
            for group in self.stage.norm_groups():
                builder.collective(
                    "all_reduce", 4, "fp32", group, stream=COMPUTE, name="all_reduce gradient norm"
                )
            scales = scale_kernels(sum(numels), "fp32", len(numels))
            builder.kernels("clip gradients", [replace(kernel, launches=len(numels)) for kernel in scales])
        local_numels = [numel for chunk in self.stage_hooks for numel in chunk.own_numels]
        update(
            builder,
            training,
            UpdatedTensor.flat(local_numels),
            gradient_dtype="fp32",
            state_dtype="fp32",
            low_precision_copy=self.strategy.param_dtype != "fp32",
        )
        for chunk in self.stage_hooks:
            chunk.finish_update()

    def finish_update(self) -> None:
        """Run `_all_gather_params`. See [Note: pieces]."""
        if not self.strategy.distributed_optimizer or self.ranks == 1 or not self._numels:
            return
        builder, ranks, num_tensors = self.builder, self.ranks, len(self._numels)
        local_bytes = sum(self.own_numels) * self.param_bytes
        size = local_bytes * ranks
        builder.host("cut parameters", overhead="nanotron_piece", events=ranks * num_tensors)
        builder.allocate("buffers", local_bytes + size)
        builder.kernels(
            "join own pieces", move_kernels(local_bytes, local_bytes, launches=cat_launches(num_tensors))
        )
        builder.kernels("join pieces", move_kernels(size, size, launches=ranks * cat_launches(num_tensors)))
        builder.allocate("buffers", size)
        builder.collective(
            "all_gather", size, self.strategy.param_dtype, self.shard.name, stream=COMPUTE,
            name="all_gather parameters",
        )  # fmt: skip
        builder.kernels("copy out of the gathered", move_kernels(size, size, launches=ranks))
        builder.free("buffers", size)
        builder.kernels("copy pieces back", move_kernels(size, size, launches=ranks * num_tensors))
        builder.free("buffers", local_bytes + size)


_SHAPES = 2  # `_send_meta`: seven numbers, then sizes and strides; the receiver's host reads both


def all_forward_all_backward_steps(ranks: int, micro_batches: int) -> list[list[Step]]:
    """`AllForwardAllBackwardPipelineEngine`: every computation comes after its receive and before its
    send.
    """
    programs = []
    for rank in range(ranks):
        steps: list[Step] = []
        for number in range(micro_batches):
            steps += [*_lone_message("RECV_F", ranks, rank, number), Action("F", rank, number)]
            steps += _lone_message("SEND_F", ranks, rank, number)
        for number in range(micro_batches):
            steps += [*_lone_message("RECV_B", ranks, rank, number), Action("B", rank, number)]
            steps += _lone_message("SEND_B", ranks, rank, number)
        programs.append(steps)
    return programs


def one_forward_one_backward_steps(ranks: int, micro_batches: int) -> list[list[Step]]:
    """`OneForwardOneBackwardPipelineEngine`: in the steady turns a forward's output leaves only in front of
    the backward that follows, and a backward's gradient only after the receive of the next forward's input.
    """
    programs = []
    for rank in range(ranks):
        num_warmup = ranks - 1 - rank
        steps: list[Step] = []
        for number in range(num_warmup):
            steps += [*_lone_message("RECV_F", ranks, rank, number), Action("F", rank, number)]
            steps += _lone_message("SEND_F", ranks, rank, number)
        turns = micro_batches - num_warmup
        for number in range(turns):
            steps += _lone_message("RECV_F", ranks, rank, number + num_warmup)
            steps += _lone_message("SEND_B", ranks, rank, number - 1) if number else []
            steps.append(Action("F", rank, number + num_warmup))
            steps += _lone_message("SEND_F", ranks, rank, number + num_warmup)
            steps += [*_lone_message("RECV_B", ranks, rank, number), Action("B", rank, number)]
        steps += _lone_message("SEND_B", ranks, rank, turns - 1) if turns else []
        for number in range(turns, micro_batches):
            steps += [*_lone_message("RECV_B", ranks, rank, number), Action("B", rank, number)]
            steps += _lone_message("SEND_B", ranks, rank, number)
        programs.append(steps)
    return programs


def _lone_message(kind: Kind, ranks: int, rank: int, number: int) -> list[Step]:
    """One lone message, which the compute stream waits for. None beyond the ends of the pipeline."""
    is_back = kind in ("RECV_F", "SEND_B")
    if rank == (0 if is_back else ranks - 1):
        return []
    return [
        MessageCall(
            (Action(kind, rank, number),), is_batched=False, waits="stream", num_shape_messages=_SHAPES
        )
    ]


@dataclass(frozen=True, slots=True)
class NanotronRuntime(PipelineRuntime):
    """nanotron's `pipeline_parallel/engine.py`."""

    def check(self, micro_batches: int) -> None:
        least = self.parallelism.pipeline - 1
        if self.parallelism.schedule == "1f1b":
            expected = f"at least pipeline ranks - 1, {least}"
            check_micro_batches(self.parallelism, micro_batches, expected, lambda number: number >= least)

    def steps(self, micro_batches: int) -> list[list[Step]]:
        if self.parallelism.schedule == "gpipe":
            return all_forward_all_backward_steps(self.parallelism.pipeline, micro_batches)
        return one_forward_one_backward_steps(self.parallelism.pipeline, micro_batches)
