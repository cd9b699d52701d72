"""Modules that run once more before their backward: Megatron's `--recompute-modules` beside attention's core.

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
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from zsim.errors import NotSimulatedError
from zsim.operations.grouped_linear import GroupedLinear
from zsim.operations.mixers.gated_norm import GatedNorm
from zsim.operations.operation import Role
from zsim.operations.router import Router
from zsim.plan.ops import Kernels
from zsim.plan.workload.issued_work import kernels_of, launches_of
from zsim.plan.workload.modules import ModuleWork, ModuleWorks, Rerun
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
