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
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from zsim.errors import NotSimulatedError
from zsim.plan.ops import Kernels
from zsim.plan.workload.issued import kernels_of, launches_of
from zsim.plan.workload.modules import ModuleWork, Rerun, Works
from zsim.specs.model.expert_run import mlp_run
from zsim.specs.model.experts import GroupedLinear, Router
from zsim.specs.model.spec import Activation, Attention, Linear, Module, Norm

_READERS = Linear | Router | GroupedLinear
_UP_PROJECTIONS = ("q_a_layernorm", "q_b_proj", "kv_a_layernorm", "kv_b_proj")


def with_reruns(
    modules: Sequence[Module], works: Works, names: Collection[str]
) -> tuple[Works, tuple[Rerun, ...]]:
    """The work of a block of which `names` run once more, and the runs of modules that do so as one."""
    found, runs = list(works), []
    if "layernorm" in names or "input_layernorm" in names:
        _normalise_again(modules, found)
    if "mla_up_proj" in names:
        _project_again(modules, found)
    norm, mlp = mlp_run(modules)
    router = next((n for n in mlp if isinstance(modules[n].work, Router)), None)
    is_routed = router is not None
    _check_found(modules, mlp, names)
    if router is not None and "moe" in names:
        runs.append(_checkpoint(modules, found, norm, mlp, has_norm="layernorm" in names))
    elif router is None and "mlp" in names and mlp:
        runs.append(_checkpoint(modules, found, norm, mlp, has_norm=False))
    else:
        if router is not None and "shared_experts" in names and router > mlp.start:
            runs.append(_checkpoint(modules, found, norm, range(mlp.start, router), has_norm=False))
        elif is_routed and "layernorm" in names:
            reader = _reader(modules, mlp)
            found[reader] = _making(found[reader], found[norm])
        if "moe_act" in names:
            for number in mlp:
                is_last = isinstance(modules[number].work, GroupedLinear)
                if is_last and isinstance(modules[number - 1].work, Activation):
                    found[number - 1 : number + 1] = _activated_again(
                        modules[number - 1], *found[number - 1 : number + 1]
                    )
    return tuple(found), tuple(runs)


def _check_found(modules: Sequence[Module], mlp: range, names: Collection[str]) -> None:
    """Raises NotSimulatedError where `names` run an MLP again that has its norm after it."""
    is_routed = any(isinstance(module.work, Router) for module in modules)
    asked = sorted({*names} & ({"moe", "shared_experts", "moe_act"} if is_routed else {"mlp"}))
    if asked and not mlp and any(isinstance(module.work, _READERS) for module in modules):
        raise NotSimulatedError(
            f"training.recompute_modules: '{asked[0]}' of a model whose MLP is followed by a norm is not "
            "simulated; expected core_attn alone, or activation_checkpointing 'full'"
        )


def _reader(modules: Sequence[Module], run: range) -> int:
    """The first module that keeps the run's input."""
    return next(n for n in run if isinstance(modules[n].work, _READERS) and not modules[n].shares_input)


def _kept(work: ModuleWork) -> tuple[int, ...]:
    """The tensors that a module keeps, the first of which is dropped. Raises NotSimulatedError if it keeps
    none, as a frozen product does.
    """
    if not work.tensors.saved:
        raise NotSimulatedError(
            "training.recompute_modules: what runs again before a frozen module, which keeps no input, is "
            "not simulated; expected core_attn alone, or activation_checkpointing 'full'"
        )
    return work.tensors.saved


def _making(reader: ModuleWork, maker: ModuleWork) -> ModuleWork:
    """The work of a module whose first kept tensor, `maker`'s output, is made again before its backward."""
    dropped, *kept = _kept(reader)
    return replace(
        reader,
        tensors=replace(reader.tensors, saved=tuple(kept)),
        recompute=maker.forward,
        recompute_launches=launches_of(maker.forward),
        recomputed_bytes=dropped,
    )


def _normalise_again(modules: Sequence[Module], works: list[ModuleWork]) -> None:
    """Make the input of latent attention again. Nothing changes where attention is not latent."""
    core = next((n for n, one in enumerate(modules) if isinstance(one.work, Attention)), 0)
    attention = modules[core].work
    if isinstance(attention, Attention) and attention.is_latent:
        norm = next(n for n in range(core) if isinstance(modules[n].work, Norm))
        reader = _reader(modules, range(norm + 1, core))
        works[reader] = _making(works[reader], works[norm])


def _project_again(modules: Sequence[Module], works: list[ModuleWork]) -> None:
    """Latent attention keeps the tensors that its up-projections' norms keep, and makes the others again
    before its backward. Nothing changes where attention is not latent.
    """
    core = next((n for n, one in enumerate(modules) if isinstance(one.work, Attention)), None)
    if core is None:
        return
    attention = modules[core].work
    assert isinstance(attention, Attention)
    if not attention.is_latent:
        return
    made = [n for n in range(core) if modules[n].name.endswith(_UP_PROJECTIONS)]
    again = tuple(kernel for n in made for kernel in kernels_of(works[n].forward).kernels)
    dropped = sum(sum(works[n].tensors.saved) for n in made if isinstance(modules[n].work, Linear))
    for number in made:
        if isinstance(modules[number].work, Linear):
            works[number] = replace(works[number], tensors=replace(works[number].tensors, saved=()))
    *inputs, statistics = _kept(works[core])
    work = works[core]
    rotary = kernels_of(work.forward).kernels[:-1]
    works[core] = replace(
        work,
        tensors=replace(work.tensors, saved=(statistics,)),
        recompute=Kernels((*again, *rotary)),
        recompute_launches=launches_of(Kernels((*again, *rotary))),
        recomputed_bytes=sum(inputs) + dropped,
    )


def _activated_again(module: Module, maker: ModuleWork, reader: ModuleWork) -> tuple[ModuleWork, ModuleWork]:
    """The works of an activation that keeps its input alone, and of its reader, before whose backward all
    else is made again with the output."""
    assert isinstance(module.work, Activation)
    inputs = 2 if module.work.gated else 1
    kept, made = maker.tensors.saved[:inputs], maker.tensors.saved[inputs:]
    again = _making(reader, maker)
    return (
        replace(maker, tensors=replace(maker.tensors, saved=kept)),
        replace(again, recomputed_bytes=again.recomputed_bytes + sum(made)),
    )


def _checkpoint(
    modules: Sequence[Module], works: list[ModuleWork], norm: int, run: range, *, has_norm: bool
) -> Rerun:
    """A checkpoint around a run of modules, which holds the output of the norm before it, unless the norm
    runs once more as well."""
    if has_norm:
        return Rerun(norm, run.stop, has_norm=True)
    reader = _reader(modules, run)
    held, *kept = _kept(works[reader])
    works[reader] = replace(works[reader], tensors=replace(works[reader].tensors, saved=tuple(kept)))
    works[norm] = replace(works[norm], kept_outputs=(held,))
    return Rerun(run.start, run.stop)


def without_saved(work: ModuleWork) -> ModuleWork:
    """The work of a module whose kept tensors are there already."""
    return replace(work, tensors=replace(work.tensors, saved=()), kept_outputs=())
