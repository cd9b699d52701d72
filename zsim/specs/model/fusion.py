"""Projections of one input as a single product, as Megatron's and nanotron's layers have them.

`linear_qkv` makes queries, keys and values, and `linear_fc1` a gated MLP's two inputs.

Source: Megatron-Core 0.16.1 core/transformer/attention.py, mlp.py, and nanotron 2411b022 models/llama.py
(`qkv_proj`, `gate_up_proj`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from zsim.operations import Linear
from zsim.operations.operation import Role, operations_of
from zsim.specs.model.spec import (
    Block,
    ModelSpec,
    Module,
    Parameter,
    join_names,
)

QKV, FC1 = "linear_qkv", "linear_fc1"
PROJ, FC2 = "linear_proj", "linear_fc2"
FUSED_PRODUCTS = (QKV, PROJ, FC1, FC2)


def fuse_projections(model: ModelSpec) -> ModelSpec:
    """The model with the products of a block that read one input fused, before attention and before a gated
    activation."""
    return model.map_blocks(_fuse_block)


def fuse_named_products(model: ModelSpec) -> ModelSpec:
    """The model with fused projections, and Megatron's names of the products around attention and around an
    activation.

    These are linear_qkv and linear_proj, linear_fc1 and linear_fc2. Several products before attention
    (multi-head latent attention) keep their own names, and that behind it is linear_proj.
    """
    return model.map_blocks(lambda block: _rename_products(_fuse_block(block)))


def _rename_products(block: Block) -> Block:
    names: dict[str, str] = {}
    for number, module in enumerate(block.modules):
        is_mixer = module.role is Role.MIXER
        if not is_mixer and module.role is not Role.ACTIVATION:
            continue
        before, after = (QKV, PROJ) if is_mixer else (FC1, FC2)
        inner = _product_names(reversed(block.modules[:number]))
        outer = _product_names(block.modules[number + 1 :], crosses_gate=is_mixer)
        if len(inner) == 1 and outer:
            names[inner[0]] = before
        if outer and (is_mixer or len(inner) == 1):
            names[outer[0]] = after
    full = {old: join_names(old.rpartition(".")[0], new) for old, new in names.items()}
    modules = tuple(replace(leaf, name=full.get(leaf.name, leaf.name)) for leaf in block.modules)
    registration = block.registration
    if registration is not None:
        registration = tuple(full.get(name, name) for name in registration)
    return replace(block, modules=modules, registration=registration)


def _product_names(modules: Iterable[Module], *, crosses_gate: bool = False) -> list[str]:
    """The products of a run of modules, up to one that ends a pair of products. With `crosses_gate` an
    activation, as that of a gate on attention's output, ends none.
    """
    ends = {Role.MIXER, Role.RESIDUAL, Role.ROUTER, Role.EXPERTS} | (
        set() if crosses_gate else {Role.ACTIVATION}
    )
    names: list[str] = []
    for module in modules:
        if module.role in ends:
            break
        if module.role is Role.PRODUCT:
            names.append(module.name)
    return names


def _fuse_block(block: Block) -> Block:
    modules, names = list(block.modules), {module.name: module.name for module in block.modules}
    index = 0
    while index < len(modules):
        run = _shared_input_products(modules, index)
        if len(run) > 1:
            fused = _fuse_products(run, _reader_after(modules, modules.index(run[-1])))
            names |= {module.name: fused.name for module in run}
            modules = [fused if module is run[0] else module for module in modules if module not in run[1:]]
        index += 1
    modules = [replace(module, op_spec=module.op_spec.split_fused_projection()) for module in modules]
    registration = block.registration
    if registration is not None:
        registration = tuple(dict.fromkeys(names[name] for name in registration))
    return Block(block.kind, tuple(modules), registration)


def _shared_input_products(modules: Sequence[Module], index: int) -> list[Module]:
    """The product at `index` and those after it, up to attention or an activation, that share its input.

    Those of latent attention stay separate, as in Megatron (core/transformer/multi_latent_attention.py).
    """
    first = modules[index]
    if first.role is not Role.PRODUCT:
        return []
    reader = _reader_after(modules, index)
    if reader is not None and reader.op_spec.is_latent:
        return [first]
    run = [first]
    for module in modules[index + 1 :]:
        if module.role is Role.PRODUCT and module.shares_input:
            run.append(module)
        elif module.role in (Role.PRODUCT, Role.ROUTER, Role.EXPERTS) or _is_core(module):
            break
    return run


def _is_core(module: Module) -> bool:
    return not module.parameters


def _reader_after(modules: Sequence[Module], index: int) -> Module | None:
    """The module without parameters that follows the product at `index`: attention or an activation."""
    return next((module for module in modules[index + 1 :] if _is_core(module)), None)


def _fuse_products(run: Sequence[Module], reader: Module | None) -> Module:
    """One product for several that share an input."""
    products = operations_of(run, Linear)
    total = sum(op_spec.out_features for op_spec in products)
    prefix = run[0].name.rpartition(".")[0]
    product_name = QKV if reader is not None and reader.role is Role.MIXER else FC1
    in_fp8 = any(parameter.in_fp8 for parameter in run[0].parameters)
    trains = any(module.trainable_numel for module in run)
    parameters = [Parameter("weight", (total, products[0].in_features), trainable=trains, in_fp8=in_fp8)]
    if any(parameter.name == "bias" for parameter in run[0].parameters):
        parameters.append(Parameter("bias", (total,), trainable=trains))
    name = f"{prefix}.{product_name}" if prefix else product_name
    product = replace(products[0], out_features=total)
    fused = Module(name, product, tuple(parameters), run[0].shares_input)
    return replace(fused, input_gradient=run[0].input_gradient)
