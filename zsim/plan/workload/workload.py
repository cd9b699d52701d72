"""The computation of one rank in a step: segments of module calls with their kernels and their memory.

A `Segment` is the modules before the blocks, one block, or the modules after the blocks. Work is derived once
per unique module: a thousand layers of one shape share it.

A trainer's logits and logs: how long the logits are held, and in MosaicML's composer metrics after every
micro-batch and a log line per step.

Transcribed from composer/trainer/trainer.py, 0.11 to 0.16 (`_train_microbatch`, `_eval_train_metrics`,
`_accumulate_time_across_ranks`, `_compute_and_log_metrics`), and torchmetrics 0.9 to 0.11 (metric.py,
utilities/distributed.py).

# [Note: the outputs]
The logits stay in `state.outputs` until the logits of the next micro-batch, for which the head has allocated
new memory, replace them (here: when the loss begins). The same holds for every loop that keeps the logits in
a variable and does not delete it (torchtitan's `pred` until its pull request 391, fms-fsdp's `output` until
its 152). In composer every metric computes torch's cross-entropy of the logits after each backward, under
autocast and without gradients. The micro-batch's other work in Python (a copy of the batch, the modules' eval
and train) is not counted.

# [Note: the log line]
After the optimizer the loss is reduced, and `.cpu().item()` waits for it, so the host has no lead when the
next step begins. Samples and time are summed over the ranks and read as well. Then both states of every
metric, a sum and a count, are gathered from all ranks (`gather_all_tensors`): a barrier, which waits for the
device, and an all-gather into a list with one tensor per rank, each filled with zeros before and copied to
after.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

from zsim.cost import memory as footprint
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.memo import Memo
from zsim.operations import Loss
from zsim.operations.fused_head import fused_head, head_index
from zsim.operations.operation import operations_of
from zsim.operations.traced import Extent
from zsim.plan.builder import COMPUTE, PlanBuilder, read_scalar
from zsim.plan.ops import Group, Kernels
from zsim.plan.workload.modules import (
    NO_WORK,
    BlockWork,
    ModuleWork,
    ModuleWorks,
    backward_order,
    checkpoint_block,
    module_work,
    reuse_stream_gradient,
)
from zsim.plan.workload.reruns import apply_reruns, drop_saved_tensors, tile_mlp
from zsim.specs.model.spec import Block, ModelSpec, Module, Parameter, Tower, join_names
from zsim.specs.strategy.training import Checkpointing, TrainingConfig

_MOST_CACHED = 8  # models under a training


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A call of a module in the model."""

    name: str
    segment: str
    module: Module
    work: ModuleWork
    prefix: str = ""

    def parameter_name(self, parameter: Parameter) -> str:
        """The complete name of one of its parameters."""
        return join_names(self.prefix, self.module.path_of(parameter))

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self.module.parameters

    @property
    def numel(self) -> int:
        return self.module.numel

    @property
    def trainable_parameters(self) -> tuple[Parameter, ...]:
        return self.module.trainable_parameters

    @property
    def trainable_numel(self) -> int:
        return self.module.trainable_numel

    @property
    def borrowed_gradient_numel(self) -> int:
        """Elements of the gradient that this module makes for another module's weight."""
        return 0 if self.module.borrows_frozen else self.borrowed_numel

    @property
    def borrowed_numel(self) -> int:
        """Elements of another module's weight that this module multiplies by (a tied head), else 0."""
        borrows = self.module.op_spec.may_borrow_weight and not self.module.has_weight
        return self.module.op_spec.weight_numel if borrows else 0


@dataclass(frozen=True)
class Segment:
    """Modules that run back to back."""

    name: str
    kind: str
    """One of "before", "block", "between" (of two blocks) and "after"."""
    calls: tuple[ModuleCall, ...]
    is_checkpointed: bool
    input_bytes: int
    """Bytes of the input that the checkpoint holds."""
    output_bytes: int = 0
    """Bytes of the block's recomputed output, which a reentrant checkpoint holds until its backward has
    ended.
    """
    recomputed: tuple[ModuleCall, ...] = ()
    """Calls of a checkpointed block that run again before backward."""
    stops_at: ModuleCall | None = None
    """Recomputation enters this call (its hooks run) but stops before its kernels, because all tensors that
    backward needs exist by then.
    """
    registration: tuple[str, ...] | None = None
    num_before_recomputation: int = 0
    """Calls at the end whose backward runs before recomputation begins."""
    reruns: tuple[tuple[ModuleCall, ...], ...] = ()
    """Calls that run once more before the backward of the last of them. Their first forward keeps nothing,
    except for a first call that runs once more for its output.
    """
    group: str = ""
    """The first of the blocks that share one checkpoint, which has its input. The last one runs all of them
    again, and has their output, which the first one's backward frees. "" for a checkpoint of its own.
    """
    freed_bytes: int = 0
    """Bytes of the shared checkpoint's output that the first block's backward frees."""

    @cached_property
    def backward_calls(self) -> tuple[ModuleCall, ...]:
        """Calls in the order in which autograd comes back to them."""
        return tuple(self.calls[n] for n in backward_order([call.module for call in self.calls]))

    @cached_property
    def reruns_by_last_call(self) -> Mapping[str, tuple[ModuleCall, ...]]:
        """The calls that run once more, by the name of the last of them."""
        return {calls[-1].name: calls for calls in self.reruns}

    @cached_property
    def unsaved_calls(self) -> frozenset[str]:
        """Names of calls whose first forward keeps nothing."""
        return frozenset(call.name for calls in self.reruns for call in calls if call.work.saved_bytes)

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(parameter for call in self.calls for parameter in call.parameters)

    @cached_property
    def numel(self) -> int:
        return sum(call.numel for call in self.calls)

    @cached_property
    def has_backward(self) -> bool:
        """Whether autograd comes back to it. A segment without modules counts as one."""
        return not self.calls or any(call.module.has_backward for call in self.calls)

    @cached_property
    def checkpoint_bytes(self) -> int:
        """Bytes of the segment's input and of its calls' kept outputs."""
        return self.input_bytes + sum(sum(call.work.kept_outputs) for call in self.calls)


@dataclass(frozen=True)
class Workload(Memo):
    """All segments in forward order."""

    model: ModelSpec
    training: TrainingConfig
    segments: tuple[Segment, ...]
    residual_bytes: int
    """Bytes of the gradient of the residual stream, alive from the head's backward on. Of a tower's stream,
    where that has more.
    """
    message_bytes: int
    """Bytes of the residual stream between blocks, which a stage of a pipeline hands on."""
    fused_head: str = ""
    """The module whose weight the loss uses without calling the module. "" if it is called."""
    logs: MetricLog | None = None
    """The logits that the trainer holds, and its metrics."""
    _derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def numel(self) -> int:
        return self.model.numel


def make_workload(model: ModelSpec, training: TrainingConfig) -> Workload:
    """The workload of a model under a training. The work of every unique module is derived once."""
    return make_workloads([model], training)[0]


def make_workloads(stages: Sequence[ModelSpec], training: TrainingConfig) -> list[Workload]:
    """The workloads of the stages of a model, which share the work of the modules that they share."""
    deriver = _Deriver(BatchShape.of(training), WorkOptions.of(training), training)
    return [_workload(stage, deriver, training) for stage in stages]


def _workload(model: ModelSpec, deriver: _Deriver, training: TrainingConfig) -> Workload:
    shape, options = BatchShape.of(training), WorkOptions.of(training)
    stream = shape.split(model.token_shards)
    head = deriver.fuse_head(model.after) if options.loss.includes_head else ""
    tower_before = model.towers[0].before if model.towers else ()
    segments = [deriver.segment("before", "before", "", (*model.before, *tower_before))]
    operations = [module.op_spec for block in model.unique_blocks for module in block.modules]
    streams = max((work.residual_streams for work in operations), default=1)
    checkpoint = streams * footprint.checkpoint_bytes(model.hidden_size, stream, options)
    for number, tower in enumerate(model.towers):
        following = model.towers[number + 1].before if number + 1 < len(model.towers) else ()
        segments += deriver.tower(tower, following)
    for number, block in enumerate(model.blocks, model.first_block):
        if not block.is_wrapped:
            segments.append(deriver.segment(f"between {number}", "between", "", block.modules))
            continue
        input_bytes = (
            checkpoint if block.input_extent is None else deriver.block_input_bytes(model, block.input_extent)
        )
        name = model.block_name(number)
        is_reached = any(module.has_backward for module in block.modules)
        policy = training.block_policy(number) if is_reached else "none"
        count = training.layers_per_checkpoint
        if count > 1 and policy == "full":
            index = number - model.first_block
            first = model.block_name(number - index % count)
            segments.append(deriver.grouped_block(name, block, input_bytes, first))
            if index % count == count - 1:
                segments[-count:] = _share_checkpoint(segments[-count:], input_bytes)
        else:
            segments.append(deriver.block(name, block, policy, input_bytes))
    segments.append(deriver.segment("after", "after", "", model.after))
    logs = metric_log(model, stream, options)
    largest = max([checkpoint, *map(deriver.tower_stream_bytes, model.towers)])
    return Workload(model, training, tuple(segments), largest, checkpoint, head, logs)


def _share_checkpoint(group: Sequence[Segment], output_bytes: int) -> list[Segment]:
    """Blocks of which the last one runs all again, to the group's output of `output_bytes`."""
    recomputed_calls = tuple(call for segment in group for call in segment.calls)
    first, *middle_segments, last = group
    last = replace(last, recomputed=recomputed_calls, output_bytes=output_bytes)
    return [replace(first, freed_bytes=output_bytes), *middle_segments, last]


class _Deriver:
    """Derives segments, and caches the work of modules and of blocks by module identity."""

    def __init__(self, shape: BatchShape, options: WorkOptions, training: TrainingConfig) -> None:
        self._shape = shape
        self._options = options
        self._training = training
        self._module_works: dict[tuple[int, bool], ModuleWork] = {}
        self._blocks: dict[tuple[Checkpointing, tuple[int, ...]], BlockWork] = {}

    def fuse_head(self, modules: tuple[Module, ...]) -> str:
        """Give the head the fused work of head and loss, and the modules after it no work. Returns the head's
        name, "" if there is no head.
        """
        index = head_index(modules)
        if index is None:
            return ""
        shape = self._shape.seen_by(modules[index])
        fused = fused_head(modules[index], shape, self._options)
        self._module_works[id(modules[index]), False] = ModuleWork(
            forward=Kernels(fused.forward),
            backward=Kernels(fused.backward),
            forward_launches=sum(kernel.launches for kernel in fused.forward),
            backward_launches=sum(kernel.launches for kernel in fused.backward),
            tensors=fused.tensors,
        )
        self._module_works |= {(id(module), False): NO_WORK for module in modules[index + 1 :]}
        return modules[index].name

    def segment(self, name: str, kind: str, prefix: str, modules: tuple[Module, ...]) -> Segment:
        """The segment before or after the blocks, which is never recomputed."""
        module_works = tuple(self._work(module) for module in modules)
        return Segment(name, kind, _calls(name, prefix, modules, module_works), False, 0)

    def tower(self, tower: Tower, following: tuple[Module, ...]) -> list[Segment]:
        """The blocks of a tower, by its own policy, and its projector with the `following` tower's modules
        before its blocks.
        """
        stream_bytes = self.tower_stream_bytes(tower)
        segments = []
        for number, block in enumerate(tower.blocks):
            is_reached = any(module.has_backward for module in block.modules)
            policy = self._training.tower_checkpointing if is_reached else "none"
            segments.append(self.block(tower.block_name(number), block, policy, stream_bytes))
        name = "audio projector" if tower.sees_sounds else "projector"
        return [*segments, self.segment(name, "between", "", (*tower.after, *following))]

    def tower_stream_bytes(self, tower: Tower) -> int:
        """Bytes of the input of a tower's block. 0 without blocks."""
        if not tower.blocks:
            return 0
        shape = self._shape.seen_by(tower.blocks[0].modules[0])
        return footprint.checkpoint_bytes(tower.hidden_size, shape, self._options)

    def block_input_bytes(self, model: ModelSpec, extent: Extent) -> int:
        """Bytes of a captured block's inputs."""
        assert model.captured is not None
        part = self._shape.sequences / model.captured.samples
        return extent.total_bytes(part, self._options.activation_bytes)

    def block(self, name: str, block: Block, policy: Checkpointing, input_bytes: int) -> Segment:
        """A block, whose input and output have `input_bytes` bytes each."""
        block_work, modules = self._block(block, policy), block.modules
        calls = _calls(name, name, modules, block_work.per_module)
        if policy not in ("full", "selective-op"):
            reruns = tuple(
                tuple(
                    replace(call, work=drop_saved_tensors(call.work))
                    if rerun.has_norm and not number
                    else call
                    for number, call in enumerate(calls[rerun.start : rerun.end])
                )
                for rerun in block_work.reruns
            )
            return Segment(name, "block", calls, False, 0, registration=block.registration, reruns=reruns)
        recomputed = _calls(name, name, modules[: len(block_work.recomputed)], block_work.recomputed)
        remaining_calls = calls[len(recomputed) :]
        output = input_bytes if policy == "full" and self._training.checkpoint_is_reentrant else 0
        return Segment(
            name,
            "block",
            calls,
            True,
            input_bytes,
            output_bytes=output,
            freed_bytes=output,
            recomputed=recomputed,
            stops_at=remaining_calls[0] if remaining_calls and remaining_calls[0].numel else None,
            registration=block.registration,
            num_before_recomputation=(
                0 if self._training.checkpoint_is_reentrant else footprint.runs_before_recomputation(block)
            ),
        )

    def grouped_block(self, name: str, block: Block, input_bytes: int, first: str) -> Segment:
        """A block that shares the checkpoint of block `first`, whose input of `input_bytes` it is. The other
        blocks keep theirs while all are run again.
        """
        is_first = name == first
        module_works = self._block(block, "full" if is_first else "none").per_module
        calls = _calls(name, name, block.modules, module_works)
        input_bytes = input_bytes if is_first else 0
        return Segment(name, "block", calls, True, input_bytes, registration=block.registration, group=first)

    def _block(self, block: Block, policy: Checkpointing) -> BlockWork:
        key = policy, tuple(id(module) for module in block.modules)
        if key not in self._blocks:
            selects = policy == "selective"
            single_works = tuple(
                self._work(module, is_selective=selects and _is_run_again(module)) for module in block.modules
            )
            tiles = self._training.mlp_tiles
            if tiles > 1 and any(module.has_backward and not module.sample_rows for module in block.modules):
                single_works = tile_mlp(block.modules, single_works, self._shape, self._options, tiles)
            module_works = reuse_stream_gradient(block.modules, single_works, self._shape, self._options)
            if policy in ("full", "selective-op"):
                stops_early = self._training.checkpoint_stops_early and self._training.mlp_tiles == 1
                self._blocks[key] = checkpoint_block(
                    block, module_works, policy, self._shape, self._options, stops_early=stops_early
                )
            else:
                module_works, reruns = apply_reruns(
                    block.modules, module_works, self._training.recompute_modules
                )
                self._blocks[key] = BlockWork(module_works, (), reruns)
        return self._blocks[key]

    def _work(self, module: Module, *, is_selective: bool = False) -> ModuleWork:
        key = id(module), is_selective
        if key not in self._module_works:
            self._module_works[key] = module_work(
                module, self._shape, self._options, is_selective=is_selective
            )
        return self._module_works[key]


def _calls(
    name: str, prefix: str, modules: Sequence[Module], module_works: ModuleWorks
) -> tuple[ModuleCall, ...]:
    return tuple(
        ModuleCall(join_names(prefix, module.name), name, module, call_work, prefix)
        for module, call_work in zip(modules, module_works, strict=True)
    )


def _is_run_again(module: Module) -> bool:
    """Whether "selective" runs the module again in backward: the core of attention, where it has a
    backward.
    """
    return module.op_spec.is_run_again and module.has_backward


class Workloads:
    """Workloads that plans have in common. Those of equal models under equal trainings, whatever shards them,
    are made once, and with them what `Workload.memoize` caches. The most recently used are kept.
    """

    def __init__(self) -> None:
        self._cached: list[
            tuple[TrainingConfig, Sequence[ModelSpec], list[Workload]]
        ] = []  # last used at the end

    def of(self, stages: Sequence[ModelSpec], training: TrainingConfig) -> list[Workload]:
        """The workloads of the stages of a model, as of `make_workloads`."""
        for index, (cached_training, models, workloads) in enumerate(self._cached):
            if cached_training == training and models == stages:
                self._cached.append(self._cached.pop(index))
                return workloads
        workloads = make_workloads(stages, training)
        self._cached = [*self._cached, (training, stages, workloads)][-_MOST_CACHED:]
        return workloads


OUTPUTS, METRICS = "outputs", "metrics"  # owners of memory changes
_STATES = 2
_LAUNCHES_PER_RANK = 2


@dataclass(frozen=True, slots=True)
class MetricLog:
    """The logits that a trainer holds, and the metrics that it computes from them one after the other."""

    bytes: int
    """Bytes of the logits that are held."""
    num_metrics: int
    kernels: Kernels
    """The kernels of each metric."""
    tensors: tuple[int, ...]
    """Bytes of each tensor that a metric allocates temporarily."""

    def begin_step(self, builder: PlanBuilder) -> None:
        """Allocate the logits that the previous step left."""
        builder.allocate("activations", self.bytes, owner=OUTPUTS)

    def replace_outputs(self, builder: PlanBuilder) -> None:
        """Replace the held logits by those of this micro-batch. See [Note: the outputs]."""
        builder.free("activations", self.bytes, owner=OUTPUTS)
        builder.allocate("activations", self.bytes, owner=OUTPUTS)

    def end_micro_batch(self, builder: PlanBuilder) -> None:
        """Issue the metrics of a micro-batch, after its backward. See [Note: the outputs]."""
        for _ in range(self.num_metrics):
            builder.allocate("activations", sum(self.tensors), owner=METRICS, tensors=self.tensors)
            builder.kernels(METRICS, self.kernels.kernels)
            builder.free("activations", sum(self.tensors), owner=METRICS)

    def end_step(self, builder: PlanBuilder) -> None:
        """Free the logits and issue the log line. See [Note: the log line]."""
        builder.free("activations", self.bytes, owner=OUTPUTS)
        if not self.num_metrics:
            return
        groups = _all_ranks(builder.groups.values())
        ranks = prod(group.size for group in groups)
        names = [group.name for group in groups]
        for scalar in ("loss", "samples", "batch time"):
            read_scalar(builder, scalar, "fp32", names)
        for _ in range(self.num_metrics):
            builder.host("reduce metric", overhead="metric_reduction")
            for _ in range(_STATES if groups else 0):
                read_scalar(builder, "barrier", "fp32", names)
                launches = _LAUNCHES_PER_RANK * ranks
                builder.add(
                    "gather metric", "host", None, launches=launches, overhead="metric_part", events=ranks
                )
                for group in groups:
                    builder.collective("all_gather", 4 * group.size, "fp32", group.name, stream=COMPUTE)


def _all_ranks(groups: Iterable[Group]) -> list[Group]:
    """A group of all ranks, or else all groups of several ranks. [] if every group is one rank."""
    multi_rank_groups = [group for group in groups if group.size > 1]
    world = max((group.members.size for group in multi_rank_groups), default=1)
    return next(([group] for group in multi_rank_groups if group.size == world), multi_rank_groups)


def metric_log(model: ModelSpec, shape: BatchShape, options: WorkOptions) -> MetricLog | None:
    """The logits that the trainer holds, and its metrics, for micro-batches of `shape`. None if it holds
    none.
    """
    loss = next(iter(operations_of(model.after, Loss)), None)
    if loss is None or loss.holds_logits == "no":
        return None
    kernels = Kernels(loss.metric_kernels(shape, options))
    logits = shape.tokens * loss.vocab_size
    tensors = loss.metric_sizes(shape, options)
    element_bytes = 4 if loss.holds_logits == "in fp32" else options.activation_bytes
    return MetricLog(logits * element_bytes, loss.num_metrics, kernels, tensors)
