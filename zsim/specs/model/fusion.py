"""Projections of one input as a single product, as Megatron's and nanotron's layers have them.

`linear_qkv` makes queries, keys and values, and `linear_fc1` a gated MLP's two inputs.

Source: Megatron-Core 0.16.1 core/transformer/attention.py, mlp.py, and nanotron 2411b022 models/llama.py
(`qkv_proj`, `gate_up_proj`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from zsim.specs.model.experts import Experts, Router
from zsim.specs.model.spec import (
    Activation,
    Attention,
    Block,
    Linear,
    ModelSpec,
    Module,
    Parameter,
    Residual,
    joined,
)

QKV, FC1 = "linear_qkv", "linear_fc1"
PROJ, FC2 = "linear_proj", "linear_fc2"
MEGATRON_PRODUCTS = (QKV, PROJ, FC1, FC2)


def with_fused_projections(model: ModelSpec) -> ModelSpec:
    """The model with the products of a block that read one input fused, before attention and before a gated
    activation."""
    return model.with_each_block(_fused)


def with_megatron_products(model: ModelSpec) -> ModelSpec:
    """The model with fused projections, and Megatron's names of the products around attention and around an
    activation.

    These are linear_qkv and linear_proj, linear_fc1 and linear_fc2. Several products before attention
    (multi-head latent attention) keep their own names.
    """
    return model.with_each_block(lambda block: _named(_fused(block)))


def _named(block: Block) -> Block:
    names: dict[str, str] = {}
    for number, module in enumerate(block.modules):
        if not isinstance(module.work, Attention | Activation):
            continue
        before, after = (QKV, PROJ) if isinstance(module.work, Attention) else (FC1, FC2)
        inner = _products(reversed(block.modules[:number]))
        outer = _products(block.modules[number + 1 :])
        if len(inner) == 1 and outer:
            names |= {inner[0]: before, outer[0]: after}
    full = {old: joined(old.rpartition(".")[0], new) for old, new in names.items()}
    modules = tuple(replace(one, name=full.get(one.name, one.name)) for one in block.modules)
    registration = block.registration
    if registration is not None:
        registration = tuple(full.get(name, name) for name in registration)
    return replace(block, modules=modules, registration=registration)


def _products(modules: Iterable[Module]) -> list[str]:
    """The products of a run of modules, up to one that ends a pair of products."""
    found: list[str] = []
    for module in modules:
        if isinstance(module.work, Attention | Activation | Residual | Router | Experts):
            break
        if isinstance(module.work, Linear):
            found.append(module.name)
    return found


def _fused(block: Block) -> Block:
    modules, names = list(block.modules), {module.name: module.name for module in block.modules}
    place = 0
    while place < len(modules):
        run = _run(modules, place)
        if len(run) > 1:
            one = _together(run, _reads(modules, modules.index(run[-1])))
            names |= {module.name: one.name for module in run}
            modules = [one if module is run[0] else module for module in modules if module not in run[1:]]
        place += 1
    modules = [
        replace(module, work=replace(module.work, splits_fused_qkv=True))
        if isinstance(module.work, Attention)
        else module
        for module in modules
    ]
    registration = block.registration
    if registration is not None:
        registration = tuple(dict.fromkeys(names[name] for name in registration))
    return Block(block.kind, tuple(modules), registration)


def _run(modules: Sequence[Module], place: int) -> list[Module]:
    """The product at `index` and those after it, up to attention or an activation, that share its input.

    Those of latent attention stay separate, as in Megatron (core/transformer/multi_latent_attention.py).
    """
    first = modules[place]
    if not isinstance(first.work, Linear):
        return []
    reader = _reads(modules, place)
    if reader is not None and isinstance(reader.work, Attention) and reader.work.is_latent:
        return [first]
    run = [first]
    for module in modules[place + 1 :]:
        if isinstance(module.work, Linear) and module.shares_input:
            run.append(module)
        elif isinstance(module.work, Linear | Router | Experts) or _is_core(module):
            break
    return run


def _is_core(module: Module) -> bool:
    return not module.parameters


def _reads(modules: Sequence[Module], place: int) -> Module | None:
    """The module without parameters that follows the product at `index`: attention or an activation."""
    return next((module for module in modules[place + 1 :] if _is_core(module)), None)


def _together(run: Sequence[Module], reader: Module | None) -> Module:
    """One product for several that share an input."""
    works = [module.work for module in run if isinstance(module.work, Linear)]
    total = sum(work.out_features for work in works)
    prefix = run[0].name.rpartition(".")[0]
    own = QKV if reader is not None and isinstance(reader.work, Attention) else FC1
    in_fp8 = any(parameter.in_fp8 for parameter in run[0].parameters)
    trains = any(module.trainable_numel for module in run)
    parameters = [Parameter("weight", (total, works[0].in_features), trainable=trains, in_fp8=in_fp8)]
    if any(parameter.name == "bias" for parameter in run[0].parameters):
        parameters.append(Parameter("bias", (total,), trainable=trains))
    name = f"{prefix}.{own}" if prefix else own
    product = replace(works[0], out_features=total)
    made = Module(name, product, tuple(parameters), run[0].shares_input)
    return replace(made, input_gradient=run[0].input_gradient)
