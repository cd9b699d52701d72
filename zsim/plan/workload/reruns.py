"""Modules that run once more before their backward: Megatron's `--recompute-modules`, and MLPs in tiles.

As in the text of Megatron-Core 0.16.1 (core/transformer/transformer_layer.py, moe/moe_layer.py,
moe/experts.py, core/tensor_parallel/random.py). "moe_act" and "layernorm" drop an output
(`CheckpointWithoutOutput`), which Megatron makes again when backward reaches the end of what was computed
from it, zsim at the first module that reads it: the activation before the experts' second product, the norms
before the router and before latent attention. Before other attention and dense MLPs the norm is a part of the
product (`TELayerNormColumnParallelLinear`) and stays. "input_layernorm" is the norm before latent attention
alone.

"mla_up_proj" drops the queries, keys and values of multi-head latent attention, which their norms,
up-projections and rotary positions make again (`qkv_up_proj_and_rope_apply` of
core/transformer/multi_latent_attention.py). The tensors between norms and projections go too. "moe",
"shared_experts" and "mlp" are checkpoints around the layer of experts, around its shared experts and around a
dense MLP. They keep their input alone, the layer of experts not even this where its norm runs once more, and
run with their exchanges before the backward of their last module.

"gdn_norm_out" drops the output of Gated DeltaNet's norm (d98e8a64 core/ssm/gated_delta_net/common.py).

# [Note: tiled MLPs]
MLPs are computed in tiles of their tokens, so that no tensor of the intermediate width is ever whole. As
`TiledMLP` (DeepSpeed 0.19.8 runtime/sequence_parallel/ulysses_sp.py; Bekman et al. 2025, "Arctic Long
Sequence Training", arXiv 2506.13996). Forward runs every tile without autograd and concatenates the outputs.
It keeps the input alone. Backward fills the gradient of the input with zeros. It then runs each tile forward
again, with autograd, and backward: gradients of weights are added up over the tiles, and that of the input
into its part of the whole. All gradients of weights are ready with the last tile.

Each tile's kernels are here in the order of its modules, but module by module: all tiles of the first product
are issued before those of the next. Left out: the host's number of tiles, on which ranks agree (an all-reduce
of one number).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from zsim.cost.kernels.kernel import Kernel, elementwise
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.cost.kernels.update import accumulate_kernels, fill_kernels
from zsim.errors import NotSimulatedError
from zsim.operations.grouped_linear import GroupedLinear
from zsim.operations.mixers.gated_norm import GatedNorm
from zsim.operations.operation import Role
from zsim.operations.router import Router
from zsim.operations.tensors import ModuleTensors, Sizes
from zsim.plan.builder import move_kernels
from zsim.plan.ops import Kernels
from zsim.plan.workload.issued_work import kernels_of, launches_of, num_launches
from zsim.plan.workload.modules import ModuleWork, ModuleWorks, Rerun, module_work
from zsim.specs.model.expert_layer import mlp_module_range
from zsim.specs.model.spec import Activation, Linear, Module

_READERS = Linear | Router | GroupedLinear
_UP_PROJECTIONS = ("q_a_layernorm", "q_b_proj", "kv_a_layernorm", "kv_b_proj")


def apply_reruns(
    modules: Sequence[Module], module_works: ModuleWorks, names: Collection[str]
) -> tuple[ModuleWorks, tuple[Rerun, ...]]:
    """The work of a block of which `names` run once more, and the runs of modules that do so as one."""
    changed, runs = list(module_works), []
    if "layernorm" in names or "input_layernorm" in names:
        _rerun_norms(modules, changed)
    if "mla_up_proj" in names:
        _rerun_projections(modules, changed)
    if "gdn_norm_out" in names:
        _rerun_gated_norm(modules, changed)
    norm, mlp = mlp_module_range(modules)
    router = next((n for n in mlp if modules[n].role is Role.ROUTER), None)
    is_routed = router is not None
    _check_mlp(modules, mlp, names)
    if router is not None and "moe" in names:
        runs.append(_checkpoint(modules, changed, norm, mlp, has_norm="layernorm" in names))
    elif router is None and "mlp" in names and mlp:
        runs.append(_checkpoint(modules, changed, norm, mlp, has_norm=False))
    else:
        if router is not None and "shared_experts" in names and router > mlp.start:
            runs.append(_checkpoint(modules, changed, norm, range(mlp.start, router), has_norm=False))
        elif is_routed and "layernorm" in names:
            reader = _reader(modules, mlp)
            changed[reader] = _remake_input(changed[reader], changed[norm])
        if "moe_act" in names:
            for number in mlp:
                is_last = modules[number].role is Role.EXPERT_PRODUCT
                if is_last and modules[number - 1].role is Role.ACTIVATION:
                    changed[number - 1 : number + 1] = _rerun_activation(
                        modules[number - 1], *changed[number - 1 : number + 1]
                    )
    return tuple(changed), tuple(runs)


def _check_mlp(modules: Sequence[Module], mlp: range, names: Collection[str]) -> None:
    """Raises NotSimulatedError where `names` run an MLP again that has its norm after it."""
    is_routed = any(module.role is Role.ROUTER for module in modules)
    requested = sorted({*names} & ({"moe", "shared_experts", "moe_act"} if is_routed else {"mlp"}))
    if requested and not mlp and any(isinstance(module.op_spec, _READERS) for module in modules):
        raise NotSimulatedError(
            f"training.recompute_modules: '{requested[0]}' of a model whose MLP is followed by a norm is not "
            "simulated; expected core_attn alone, or activation_checkpointing 'full'"
        )


def _reader(modules: Sequence[Module], run: range) -> int:
    """The first module that keeps the run's input."""
    return next(n for n in run if isinstance(modules[n].op_spec, _READERS) and not modules[n].shares_input)


def _kept_tensors(work: ModuleWork) -> tuple[int, ...]:
    """The tensors that a module keeps, the first of which is dropped. Raises NotSimulatedError if it keeps
    none, as a frozen product does.
    """
    if not work.tensors.saved:
        raise NotSimulatedError(
            "training.recompute_modules: what runs again before a frozen module, which keeps no input, is "
            "not simulated; expected core_attn alone, or activation_checkpointing 'full'"
        )
    return work.tensors.saved


def _remake_input(reader: ModuleWork, maker: ModuleWork) -> ModuleWork:
    """The work of a module whose first kept tensor, `maker`'s output, is made again before its backward."""
    dropped_bytes, *kept = _kept_tensors(reader)
    return replace(
        reader,
        tensors=replace(reader.tensors, saved=tuple(kept)),
        recompute=maker.forward,
        recompute_launches=launches_of(maker.forward),
        recomputed_bytes=dropped_bytes,
    )


def _rerun_norms(modules: Sequence[Module], module_works: list[ModuleWork]) -> None:
    """Make the input of latent attention again. Nothing changes where attention is not latent."""
    core = next((n for n, module in enumerate(modules) if module.role is Role.MIXER), 0)
    if modules[core].op_spec.is_latent:
        norm = next(n for n in range(core) if modules[n].role is Role.NORM)
        reader = _reader(modules, range(norm + 1, core))
        module_works[reader] = _remake_input(module_works[reader], module_works[norm])


def _rerun_projections(modules: Sequence[Module], module_works: list[ModuleWork]) -> None:
    """Latent attention keeps the tensors that its up-projections' norms keep, and makes the others again
    before its backward. Nothing changes where attention is not latent.
    """
    core = next((n for n, module in enumerate(modules) if module.role is Role.MIXER), None)
    if core is None or not modules[core].op_spec.is_latent:
        return
    remade = [n for n in range(core) if modules[n].name.endswith(_UP_PROJECTIONS)]
    kernels_again = tuple(kernel for n in remade for kernel in kernels_of(module_works[n].forward).kernels)
    dropped = sum(sum(module_works[n].tensors.saved) for n in remade if modules[n].role is Role.PRODUCT)
    for number in remade:
        if modules[number].role is Role.PRODUCT:
            module_works[number] = replace(
                module_works[number], tensors=replace(module_works[number].tensors, saved=())
            )
    *inputs, statistics = _kept_tensors(module_works[core])
    work = module_works[core]
    rotary = kernels_of(work.forward).kernels[:-1]
    module_works[core] = replace(
        work,
        tensors=replace(work.tensors, saved=(statistics,)),
        recompute=Kernels((*kernels_again, *rotary)),
        recompute_launches=launches_of(Kernels((*kernels_again, *rotary))),
        recomputed_bytes=sum(inputs) + dropped,
    )


def _rerun_gated_norm(modules: Sequence[Module], module_works: list[ModuleWork]) -> None:
    """Make the input of the product behind Gated DeltaNet again from what its norm keeps. Nothing changes in
    other blocks.
    """
    for number, module in enumerate(modules[1:]):
        maker = modules[number].op_spec
        if isinstance(maker, GatedNorm) and not maker.is_in_scan and module.role is Role.PRODUCT:
            module_works[number + 1] = _remake_input(module_works[number + 1], module_works[number])


def _rerun_activation(module: Module, maker: ModuleWork, reader: ModuleWork) -> tuple[ModuleWork, ModuleWork]:
    """The works of an activation that keeps its input alone, and of its reader, before whose backward all
    else is made again with the output."""
    assert isinstance(module.op_spec, Activation)
    inputs = 2 if module.op_spec.gated else 1
    kept, remade = maker.tensors.saved[:inputs], maker.tensors.saved[inputs:]
    changed_reader = _remake_input(reader, maker)
    return (
        replace(maker, tensors=replace(maker.tensors, saved=kept)),
        replace(changed_reader, recomputed_bytes=changed_reader.recomputed_bytes + sum(remade)),
    )


def _checkpoint(
    modules: Sequence[Module], module_works: list[ModuleWork], norm: int, run: range, *, has_norm: bool
) -> Rerun:
    """A checkpoint around a run of modules, which holds the output of the norm before it, unless the norm
    runs once more as well."""
    if has_norm:
        return Rerun(norm, run.stop, has_norm=True)
    reader = _reader(modules, run)
    input_bytes, *kept = _kept_tensors(module_works[reader])
    module_works[reader] = replace(
        module_works[reader], tensors=replace(module_works[reader].tensors, saved=tuple(kept))
    )
    module_works[norm] = replace(module_works[norm], kept_outputs=(input_bytes,))
    return Rerun(run.start, run.stop)


def drop_saved_tensors(work: ModuleWork) -> ModuleWork:
    """The work of a module whose kept tensors are there already."""
    return replace(work, tensors=replace(work.tensors, saved=()), kept_outputs=())


_KEY = "training.mlp_tiles"


def tiled_modules(modules: Sequence[Module]) -> range:
    """The indices of a block's MLP: the modules of one parent, around its activation.

    Raises NotSimulatedError for experts, and for an MLP that has adapters, is cut over ranks or is no module
    of its own.
    """
    if any(module.role in (Role.ROUTER, Role.EXPERTS) for module in modules):
        raise NotSimulatedError(
            f"{_KEY}: tiles of routed experts are not simulated; expected a dense model, or it left out"
        )
    activation = next((n for n, module in enumerate(modules) if module.role is Role.ACTIVATION), None)
    parent = "" if activation is None else modules[activation].name.rpartition(".")[0]
    indices = [
        n
        for n, module in enumerate(modules)
        if parent and module.name.startswith(f"{parent}.") and module.role in (Role.PRODUCT, Role.ACTIVATION)
    ]
    if any(getattr(modules[n].op_spec, "is_adapter", False) for n in indices):
        raise NotSimulatedError(
            f"{_KEY}: tiles of an MLP with adapters are not simulated; expected training.lora.targets "
            "without its products, or it left out"
        )
    is_run = bool(indices) and indices[-1] - indices[0] == len(indices) - 1
    if not is_run or modules[indices[-1]].role is not Role.PRODUCT:
        raise NotSimulatedError(
            f"{_KEY}: found a model whose MLP is not a module of products and an activation alone; expected "
            "it left out"
        )
    return range(indices[0], indices[-1] + 1)


def tile_sizes(tokens: int, tiles: int) -> list[int]:
    """The tokens of each tile, as of `torch.chunk`: equal but for the last, and at most `tiles`."""
    size = -(-tokens // tiles)
    return [min(size, tokens - begin) for begin in range(0, tokens, size)]


def tile_mlp(
    modules: Sequence[Module], module_works: ModuleWorks, shape: BatchShape, options: WorkOptions, tiles: int
) -> ModuleWorks:
    """The work of a block's modules of which the MLP runs in `tiles`. Its activation is not Liger's."""
    run = tiled_modules(modules)
    members, options = [modules[n] for n in run], replace(options, liger=False)
    changed, e = list(module_works), options.activation_bytes
    tokens, width = shape.seen_by(members[0]).tokens, members[0].op_spec.product_features[0]
    sizes = tile_sizes(tokens, tiles)
    work_of_tile = {size: [_tile_work(member, size, options) for member in members] for size in set(sizes)}
    largest, stream_bytes = work_of_tile[sizes[0]], tokens * width * e
    tile_bytes = sum(work.forward_extra_bytes for work in largest)
    for number, index in enumerate(run):
        kernels = tuple(
            kernel for size in sizes for kernel in kernels_of(work_of_tile[size][number].forward).kernels
        )
        is_first, is_last = number == 0, number == len(members) - 1
        if is_last:
            kernels += move_kernels(stream_bytes, stream_bytes)
        changed[index] = ModuleWork(
            Kernels(kernels),
            Kernels(()),
            num_launches(kernels),
            0,
            tensors=ModuleTensors(
                saved=(stream_bytes,) if is_first else (),
                forward=(tile_bytes, stream_bytes, stream_bytes) if is_last else (tile_bytes, stream_bytes),
            ),
        )
    backward = tuple(_backward(members, work_of_tile, sizes, stream_bytes, options))
    last = run.stop - 1
    tensors: Sizes = (
        stream_bytes,  # the gradient of the output, and of the input
        stream_bytes,
        sum(work.saved_bytes for work in largest),
        max(work.backward_extra_bytes for work in largest),
        max(module.trainable_numel for module in members) * e,
    )
    tensors = tuple(size for size in tensors if size)  # a frozen MLP has no gradient of a weight
    changed[last] = replace(
        changed[last],
        backward=Kernels(backward),
        backward_launches=num_launches(backward),
        tensors=replace(changed[last].tensors, backward=tensors),
    )
    for index in run:
        changed[index] = replace(changed[index], input_gradient=changed[index].backward)
    return tuple(changed)


def _tile_work(module: Module, tokens: int, options: WorkOptions) -> ModuleWork:
    """A module's work on so many tokens of a rank."""
    return module_work(module, BatchShape(1, tokens * module.token_shards), options)


def _backward(
    members: Sequence[Module],
    work_of_tile: dict[int, list[ModuleWork]],
    sizes: Sequence[int],
    stream_bytes: int,
    options: WorkOptions,
) -> Iterator[Kernel]:
    """The kernels of backward: zeros, then each tile forward, backward, and its sums."""
    yield from fill_kernels(stream_bytes)
    total_tokens = sum(sizes)
    for number, size in enumerate(sizes):
        for work in work_of_tile[size]:
            yield from kernels_of(work.forward).kernels
        for work in reversed(work_of_tile[size]):
            yield from kernels_of(work.backward).kernels
        yield elementwise(3 * stream_bytes * size / total_tokens, options.kernel_dtype)
        for module in members if number else ():
            for parameter in module.trainable_parameters:
                yield from accumulate_kernels(parameter.numel, options.kernel_dtype, options.kernel_dtype)
