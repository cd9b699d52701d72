"""What a module runs and holds: by itself, and as it stands in a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from zsim.cost.kernels import modules as work
from zsim.cost.kernels.kernel import Kernel
from zsim.cost.memory import activations as footprint
from zsim.cost.memory.tensors import ModuleTensors, cut, module_tensors, without
from zsim.plan.ops import Kernels
from zsim.specs.model.spec import Activation, Block, Linear, Module, Residual
from zsim.specs.strategy.training import Checkpointing


@dataclass(frozen=True)
class ModuleWork:
    """One module's kernels and the tensors of its activations.

    `saved_bytes` stay from forward to backward, under full checkpointing only from recomputation on; the
    extras live only during one op. `kept_outputs`: the tensors that it leaves to the segment's checkpoint.
    """

    forward: Kernels
    backward: Kernels
    forward_launches: int
    backward_launches: int
    recompute: Kernels | None = None
    recompute_launches: int = 0
    recomputed_bytes: int = 0
    tensors: ModuleTensors = field(default_factory=ModuleTensors)
    kept_outputs: tuple[int, ...] = ()

    @cached_property
    def saved_bytes(self) -> int:
        return sum(self.tensors.saved)

    @cached_property
    def forward_extra_bytes(self) -> int:
        return sum(self.tensors.forward)

    @cached_property
    def backward_extra_bytes(self) -> int:
        return sum(self.tensors.backward)


NO_WORK = ModuleWork(Kernels(()), Kernels(()), 0, 0)

Works = tuple[ModuleWork, ...]


def module_work(
    module: Module, shape: work.BatchShape, options: work.WorkOptions, *, is_selective: bool = False
) -> ModuleWork:
    """The module by itself; `is_selective`: attention that is run again in backward (policy "selective")."""
    forward = work.forward_kernels(module, shape, options)
    backward = work.backward_kernels(module, shape, options)
    saved = footprint.saved_bytes(module, shape, options)
    kept = footprint.saved_bytes_selective(module, shape, options) if is_selective else saved
    tensors = module_tensors(module, shape, options)
    return ModuleWork(
        forward=Kernels(forward),
        backward=Kernels(backward),
        forward_launches=_launches(forward),
        backward_launches=_launches(backward),
        recompute=Kernels(forward) if is_selective else None,
        recompute_launches=_launches(forward) if is_selective else 0,
        recomputed_bytes=saved - kept if is_selective else 0,
        tensors=replace(tensors, saved=cut(kept, tensors.saved)),
    )


def on_residual_stream(
    modules: Sequence[Module], works: Works, shape: work.BatchShape, options: work.WorkOptions
) -> Works:
    """A block's works. What a product adds to the residual stream, as it is, has the stream's gradient for
    its output's."""
    if options.autocast or options.stream_bytes != options.activation_bytes:
        return works  # autograd casts it
    result = list(works)
    for number, after in enumerate(modules[1:]):
        product = modules[number].work
        if isinstance(product, Linear) and isinstance(after.work, Residual) and not after.work.dropout:
            given = shape.tokens * product.out_features * options.activation_bytes
            backward = without(works[number].tensors.backward, given)
            tensors = replace(works[number].tensors, backward=backward)
            result[number] = replace(works[number], tensors=tensors)
    return tuple(result)


@dataclass(frozen=True, slots=True)
class BlockWorks:
    """A block's modules in the first forward and in backward, and the first so many of them in
    recomputation, where it is checkpointed."""

    works: Works
    recomputed: Works


def checkpointed_works(
    block: Block,
    works: Works,
    policy: Checkpointing,
    shape: work.BatchShape,
    options: work.WorkOptions,
    *,
    stops_early: bool,
) -> BlockWorks:
    """The block's works, without what the checkpoint holds for them: the block's input at a first module that
    would only keep that, and with "selective-op" the outputs that are not made again."""
    keeps_outputs = policy == "selective-op"
    is_shared = keeps_outputs and options.attention == "flash"
    shared = footprint.kept_for_readers(block, shape, options) if is_shared else {}
    first = block.modules[0]
    if footprint.keeps_only_the_stream(first, options):
        shared[first.name] = works[0].saved_bytes
    kept = {module.name for module in footprint.kept_modules(block, options)} if keeps_outputs else set()
    count = len(footprint.recomputed_modules(block, stops_early=stops_early))
    forward, again = [], []
    for module, alone in zip(block.modules, works, strict=True):
        one = _without_saved(alone, shared.get(module.name, 0))
        if module.name in kept:
            again.append(_without_kernels(one, module, shape, options))
            forward.append(_keeping(one, module, shape, options))
        else:
            again.append(one)
            forward.append(_in_place(one) if _is_compiled(module, options) else one)
    return BlockWorks(tuple(forward), tuple(again[:count]))


def _without_saved(one: ModuleWork, count: int) -> ModuleWork:
    """Without `count` bytes of what it saves, which are held for it."""
    saved = without(one.tensors.saved, count)
    return replace(one, tensors=replace(one.tensors, saved=saved))


def _keeping(
    one: ModuleWork, module: Module, shape: work.BatchShape, options: work.WorkOptions
) -> ModuleWork:
    """With its output left to the checkpoint."""
    outputs = footprint.kept_outputs(module, shape, options)
    return replace(_without_output(one, outputs[0]), kept_outputs=outputs)


def _without_kernels(
    one: ModuleWork, module: Module, shape: work.BatchShape, options: work.WorkOptions
) -> ModuleWork:
    """When its output is there: of fused attention the rotary embedding is left, of a product nothing."""
    forward = work.unkept_kernels(module, shape, options)
    output = footprint.kept_outputs(module, shape, options)[0]
    return replace(
        _without_output(one, output), forward=Kernels(forward), forward_launches=_launches(forward)
    )


def _is_compiled(module: Module, options: work.WorkOptions) -> bool:
    """Whether it is an activation in a kernel that torch.compile has made: Liger brings its own."""
    if not isinstance(module.work, Activation):
        return False
    return options.compile and not (options.liger and module.work.gated)


def _in_place(one: ModuleWork) -> ModuleWork:
    """An activation that torch.compile has made writes over an input that nothing keeps (torch 2.13's
    `inplace_buffers`, _inductor/config.py)."""
    output = one.forward_extra_bytes
    return _without_output(one, output) if one.saved_bytes >= output else one


def _without_output(one: ModuleWork, count: int) -> ModuleWork:
    forward = without(one.tensors.forward, count)
    return replace(one, tensors=replace(one.tensors, forward=forward))


def _launches(kernels: Sequence[Kernel]) -> int:
    return sum(kernel.launches for kernel in kernels)
