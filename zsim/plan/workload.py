"""What one rank computes in a step: segments of module calls with their kernels and their memory.

A `Segment` is what runs before the blocks, one block, or what runs after them. Work is derived once per
distinct module shape; a thousand layers of one shape share it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from zsim.cost import footprint, work
from zsim.cost.fused_head import fused_head, head_place
from zsim.cost.tensor_sizes import ModuleTensors, module_tensors
from zsim.plan.metric_log import MetricLog, metric_log
from zsim.plan.ops import Kernels
from zsim.specs.model import Attention, Block, Linear, ModelSpec, Module, Parameter
from zsim.specs.strategy import Checkpointing, Training


@dataclass(frozen=True, slots=True)
class ModuleWork:
    """One module's kernels and activation bytes.

    `saved_bytes` stay from forward to backward; `working_bytes` are what the same tensors take while they
    exist when nothing is kept (checkpointing); the extras live only during one op. `tensors` are what they
    are sums of.
    """

    forward: Kernels
    backward: Kernels
    forward_launches: int
    backward_launches: int
    saved_bytes: int
    working_bytes: int
    forward_extra_bytes: int
    backward_extra_bytes: int
    recompute: Kernels | None = None
    recompute_launches: int = 0
    recomputed_bytes: int = 0
    tensors: ModuleTensors = field(default_factory=ModuleTensors)


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A module at its place in the model."""

    name: str
    segment: str
    module: Module
    work: ModuleWork

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self.module.parameters

    @property
    def numel(self) -> int:
        return self.module.numel

    @property
    def borrowed_numel(self) -> int:
        """Elements of the weight of another module that it multiplies with (a tied head), else 0."""
        layer = self.module.work
        if not isinstance(layer, Linear) or any(parameter.name == "weight" for parameter in self.parameters):
            return 0
        return layer.in_features * layer.out_features


@dataclass(frozen=True)
class Segment:
    """Modules that run back to back: `kind` is "before", "block" or "after".

    Under full checkpointing `recomputed` run again before backward; `output_bytes` are those of the block's
    second output, where a reentrant checkpoint holds it until its backward has ended. Recomputation enters
    `stops_at` (its hooks run) but stops before its kernels, because everything that backward needs exists by
    then.
    """

    name: str
    kind: str
    calls: tuple[ModuleCall, ...]
    is_checkpointed: bool
    checkpoint_bytes: int
    output_bytes: int = 0
    recomputed: tuple[ModuleCall, ...] = ()
    stops_at: ModuleCall | None = None
    registration: tuple[str, ...] | None = None

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(parameter for call in self.calls for parameter in call.parameters)

    @cached_property
    def numel(self) -> int:
        return sum(call.numel for call in self.calls)


@dataclass(frozen=True)
class Workload:
    """All segments in forward order; `residual_bytes` is the gradient of the residual stream, alive from
    the head's backward on; `optimizer_state_bytes` per parameter, fp32 master weights not included;
    `fused_head` names the module whose weight the loss takes without calling it ("" where it is called);
    `logs`: where the trainer takes metrics."""

    model: ModelSpec
    training: Training
    segments: tuple[Segment, ...]
    residual_bytes: int
    optimizer_state_bytes: int
    fused_head: str = ""
    logs: MetricLog | None = None

    @cached_property
    def numel(self) -> int:
        return self.model.numel


def make_workload(model: ModelSpec, training: Training) -> Workload:
    """Derive the work of every module once per shape."""
    shape = work.BatchShape.of(training)
    options = work.WorkOptions.of(training)
    deriver = _Deriver(shape, options, training)
    head = deriver.fuse_head(model.after) if training.cross_entropy == "fused_linear" else ""
    segments = [deriver.segment("before", "before", "", model.before)]
    for number, block in enumerate(model.blocks):
        name = f"{model.block_prefix}.{number}"
        segments.append(deriver.block(name, block, training.checkpointing_of(number), model.hidden_size))
    segments.append(deriver.segment("after", "after", "", model.after))
    residual = training.micro_batch_tokens * model.hidden_size * options.stream_bytes
    states = work.optimizer_state_bytes(training.optimizer, training.stored_dtype)
    logs = metric_log(model, shape, options)
    return Workload(model, training, tuple(segments), residual, states, head, logs)


class _Deriver:
    """Caches the work of modules and the calls of blocks."""

    def __init__(self, shape: work.BatchShape, options: work.WorkOptions, training: Training) -> None:
        self._shape = shape
        self._options = options
        self._training = training
        self._works: dict[int, ModuleWork] = {}
        self._selective_works: dict[int, ModuleWork] = {}
        self._kept_works: dict[int, ModuleWork] = {}
        self._sharing_works: dict[tuple[int, int], ModuleWork] = {}

    def fuse_head(self, modules: tuple[Module, ...]) -> str:
        """Let the head do the loss piece by piece, and what stands between and after nothing; the head's
        name, "" where there is none."""
        place = head_place(modules)
        if place is None:
            return ""
        fused = fused_head(modules[place], self._shape, self._options)
        self._works[id(modules[place])] = ModuleWork(
            forward=Kernels(fused.forward),
            backward=Kernels(fused.backward),
            forward_launches=sum(kernel.launches for kernel in fused.forward),
            backward_launches=sum(kernel.launches for kernel in fused.backward),
            saved_bytes=sum(fused.tensors.saved),
            working_bytes=sum(fused.tensors.saved),
            forward_extra_bytes=sum(fused.tensors.forward),
            backward_extra_bytes=sum(fused.tensors.backward),
            tensors=fused.tensors,
        )
        nothing = ModuleWork(Kernels(()), Kernels(()), 0, 0, 0, 0, 0, 0)
        self._works |= {id(module): nothing for module in modules[place + 1 :]}
        return modules[place].name

    def segment(self, name: str, kind: str, prefix: str, modules: tuple[Module, ...]) -> Segment:
        """What stands before or after the blocks: nothing of it is run again."""
        return Segment(name, kind, self._calls(name, prefix, modules, "none"), False, 0)

    def block(self, name: str, block: Block, policy: Checkpointing, hidden_size: int) -> Segment:
        calls = self._calls(name, name + ".", block.modules, policy)
        if policy not in ("full", "selective-op"):
            return Segment(name, "block", calls, False, 0, registration=block.registration)
        kept = footprint.checkpoint_bytes(hidden_size, self._shape, self._options)
        stops_early = self._training.checkpoint_stops_early
        output = kept if policy == "full" and self._training.checkpoint_is_reentrant else 0
        calls = self._without_shared(block, calls, policy)
        count = len(footprint.recomputed_modules(block, "full", stops_early=stops_early))
        recomputed, stops_at = calls[:count], None
        if policy == "selective-op":
            kept += sum(
                footprint.kept_output_bytes(module, self._shape, self._options)
                for module in footprint.kept_modules(block)
            )
            recomputed = self._without_kept(block, calls)
        elif count < len(calls) and calls[count].numel:
            stops_at = calls[count]
        return Segment(name, "block", calls, True, kept, output, recomputed, stops_at, block.registration)

    def _without_shared(
        self, block: Block, calls: tuple[ModuleCall, ...], policy: Checkpointing
    ) -> tuple[ModuleCall, ...]:
        """The calls without what the checkpoint keeps for them: the block's input at a first module that
        would only keep that, and with "selective-op" the outputs that are not made again."""
        is_selective = policy == "selective-op" and self._options.attention == "flash"
        shared = footprint.kept_for_readers(block, self._shape, self._options) if is_selective else {}
        first = calls[0]
        if footprint.keeps_only_the_stream(first.module, self._options):
            shared[first.module.name] = first.work.saved_bytes
        return tuple(self._sharing(call, shared.get(call.module.name, 0)) for call in calls)

    def _sharing(self, call: ModuleCall, count: int) -> ModuleCall:
        key, saved = (id(call.module), count), call.work.saved_bytes
        if not min(count, saved):
            return call
        if key not in self._sharing_works:
            sizes = list(call.work.tensors.saved)
            if count in sizes:
                sizes.remove(count)
            tensors = replace(call.work.tensors, saved=tuple(sizes) if count < saved else ())
            left = max(0, saved - count)
            self._sharing_works[key] = replace(call.work, saved_bytes=left, tensors=tensors)
        return replace(call, work=self._sharing_works[key])

    def _calls(
        self, name: str, prefix: str, modules: tuple[Module, ...], policy: Checkpointing
    ) -> tuple[ModuleCall, ...]:
        return tuple(
            ModuleCall(prefix + module.name, name, module, self._work(module, policy)) for module in modules
        )

    def _without_kept(self, block: Block, calls: tuple[ModuleCall, ...]) -> tuple[ModuleCall, ...]:
        """What "selective-op" runs again: everything up to the last module that saves something, except what
        was kept. Of fused attention the rotary embedding is left."""
        kept = {module.name for module in footprint.kept_modules(block)}
        last = max(number for number, call in enumerate(calls) if call.work.saved_bytes)
        again = []
        for call in calls[: last + 1]:
            if call.module.name in kept:
                key = id(call.module)
                if key not in self._kept_works:
                    forward = work.unkept_kernels(call.module, self._shape, self._options)
                    launches = sum(kernel.launches for kernel in forward)
                    self._kept_works[key] = replace(
                        call.work, forward=Kernels(forward), forward_launches=launches, forward_extra_bytes=0
                    )
                call = replace(call, work=self._kept_works[key])
            again.append(call)
        return tuple(again)

    def _work(self, module: Module, policy: Checkpointing) -> ModuleWork:
        selective = policy == "selective" and isinstance(module.work, Attention)
        works = self._selective_works if selective else self._works
        known = works.get(id(module))
        if known is not None:
            return known
        shape, options = self._shape, self._options
        forward = work.forward_kernels(module, shape, options)
        backward = work.backward_kernels(module, shape, options)
        saved = footprint.saved_bytes(module, shape, options)
        kept = footprint.saved_bytes_selective(module, shape, options) if selective else saved
        result = ModuleWork(
            forward=Kernels(forward),
            backward=Kernels(backward),
            forward_launches=sum(kernel.launches for kernel in forward),
            backward_launches=sum(kernel.launches for kernel in backward),
            saved_bytes=kept,
            working_bytes=saved,
            forward_extra_bytes=footprint.forward_extra_bytes(module, shape, options),
            backward_extra_bytes=footprint.backward_extra_bytes(module, shape, options),
            recompute=Kernels(forward) if selective else None,
            recompute_launches=sum(kernel.launches for kernel in forward) if selective else 0,
            recomputed_bytes=saved - kept if selective else 0,
            tensors=module_tensors(module, shape, options),
        )
        works[id(module)] = result
        return result
