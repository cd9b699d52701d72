"""A model with frozen parameters, and the modules of it that autograd still runs backward.

A gradient flows to a module's input only if something before it is trained. Nothing before the first
trainable parameter has a backward, and the frozen products after it have no product for their weight's
gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from zsim.cost.kernels import int8
from zsim.errors import InputError, did_you_mean
from zsim.operations.operation import Role
from zsim.specs.model.adapters import is_frozen
from zsim.specs.model.spec import (
    Block,
    ModelSpec,
    Module,
    Parameter,
    Tower,
    join_names,
)


@dataclass(frozen=True, slots=True)
class FrozenParameters:
    """The choice of a model's frozen parameters, and the types that they are kept in."""

    patterns: tuple[str, ...] = ()
    """Patterns of full parameter names."""
    all_but_adapters: bool = False
    """Every parameter is frozen but those of adapters, and those that `modules_to_save` matches."""
    modules_to_save: tuple[str, ...] = ()
    """Names of modules that are trained (PEFT's `modules_to_save`)."""
    saved_dtype: str = ""
    """The type that these are kept in. Empty for the framework's."""
    keeps_originals: bool = False
    """The frozen originals of these modules stay in memory, too."""
    stored_dtype: str = ""
    """The type that frozen weights are kept in. Empty for the framework's."""
    product_dtype: str = ""
    """The type of the weights of the blocks' products ("nf4": 4 bits, "int8": 8, as bitsandbytes replaces
    every product but the head).
    """
    quantises_routers: bool = False
    """Routers are quantised, too."""
    quantises_experts: bool = False
    """So are the stacked weights of routed experts."""
    has_fp32_stream: bool = False
    """The residual stream is fp32, and so are the outputs of quantised products."""
    inputs_require_gradients: bool = False
    """transformers' `enable_input_require_grads`."""
    patches_require_gradients: bool = False
    """The same of a tower's patches (transformers 5.24 modeling_utils.py, which hooks the embeddings of each
    model inside).
    """

    def is_frozen(self, name: str) -> bool:
        """Whether the parameter of this full name is frozen."""
        if is_frozen(name, self.patterns):
            return True
        if not self.all_but_adapters or ".lora_" in name:
            return False
        return not any(is_saved(name, module_name) for module_name in self.modules_to_save)


def is_saved(name: str, module_name: str) -> bool:
    """Whether a parameter is of a module whose name ends with `module_name`.

    PEFT 0.21.2 utils/other.py `_set_trainable`: "head" is `lm_head` as well.
    """
    components = name.split(".")
    return any(".".join(components[:end]).endswith(module_name) for end in range(1, len(components)))


def freeze_parameters(model: ModelSpec, frozen: FrozenParameters) -> ModelSpec:
    """The model with `frozen` parameters. Blocks whose frozen parameters are identical stay one object.

    Raises InputError for a pattern that matches no parameter, and if nothing is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in frozen.patterns:
        if not any(is_frozen(name, (pattern,)) for name in names):
            examples = ", ".join(names[:3])
            prefixes = dict.fromkeys(
                name.rsplit(".", number)[0] for name in names for number in range(name.count(".") + 1)
            )
            raise InputError(
                f"training.frozen: '{pattern}' matches no parameter of '{model.name}'"
                f"{did_you_mean(pattern, prefixes)}; expected patterns of names like {examples}"
            )
    before = [_freeze_module(module, module.name, frozen) for module in model.before]
    after = [_freeze_module(module, module.name, frozen) for module in model.after]
    frozen_blocks: dict[tuple[int, tuple[bool, ...]], Block] = {}
    blocks = []
    for number, block in enumerate(model.blocks, model.first_block):
        block_name = model.block_name(number)
        flags = tuple(
            frozen.is_frozen(join_names(block_name, module.path_of(parameter)))
            for module in block.modules
            for parameter in module.parameters
        )
        key = id(block), flags
        if key not in frozen_blocks:
            modules = tuple(
                _freeze_block_module(module, join_names(block_name, module.name), frozen)
                for module in block.modules
            )
            modules = tuple(_mark_fp32(modules)) if frozen.has_fp32_stream else modules
            frozen_blocks[key] = replace(block, modules=modules)
        blocks.append(frozen_blocks[key])
    lenders = before if model.is_tied else after
    after = [
        _mark_borrowed_weight(module, before if module.role is Role.EMBEDDING else lenders)
        for module in after
    ]
    towers = tuple(
        tower.map_modules(lambda name, module: _freeze_module(module, name, frozen)) for tower in model.towers
    )
    frozen_model = replace(
        model, before=tuple(before), towers=towers, blocks=tuple(blocks), after=tuple(after)
    )
    if not frozen_model.trainable_numel:
        raise InputError(f"training.frozen: no parameter of '{model.name}' is left to train")
    return _mark_gradient_flow(frozen_model, frozen)


def _mark_borrowed_weight(module: Module, lenders: Sequence[Module]) -> Module:
    """The module, marked if it uses the frozen weight of a lender.

    Such modules are a tied head, and the head and embedding of multi-token prediction. The weight is the
    first of its size, not a later one of positions or types.
    """
    numel = module.op_spec.weight_numel
    if not numel or module.has_weight:
        return module
    weights = (
        parameter
        for lender in lenders
        if lender.role in (Role.PRODUCT, Role.EMBEDDING)
        for parameter in lender.parameters
        if parameter.name == "weight" or lender.role is Role.EMBEDDING
    )
    if next((parameter.trainable for parameter in weights if parameter.numel == numel), True):
        return module
    if module.role is Role.EMBEDDING:
        return replace(module, borrows_frozen=True, input_gradient=False)
    return replace(module, borrows_frozen=True)


def _freeze_module(module: Module, name: str, frozen: FrozenParameters) -> Module:
    if module.lender:
        return replace(module, borrows_frozen=frozen.is_frozen(f"{module.lender}.weight"))
    if not module.parameters:
        return module
    prefix = name.removesuffix(module.name)
    parameters = tuple(
        _freeze_parameter(parameter, prefix + module.path_of(parameter), frozen)
        for parameter in module.parameters
    )
    return module if parameters == module.parameters else replace(module, parameters=parameters)


def _freeze_block_module(module: Module, name: str, frozen: FrozenParameters) -> Module:
    roles = (
        Role.PRODUCT,
        *((Role.ROUTER,) if frozen.quantises_routers else ()),
        *((Role.EXPERTS,) if frozen.quantises_experts else ()),
    )
    is_product = module.role in roles and not module.is_adapter_product
    module = _freeze_module(module, name, frozen)
    is_expert = module.role is Role.EXPERTS
    if not frozen.product_dtype or not is_product or (module.trains_weight and not is_expert):
        return module
    parameters = tuple(
        replace(parameter, stored_dtype=frozen.product_dtype)
        if len(parameter.shape) == (3 if is_expert else 2) and not parameter.trainable
        else parameter
        for parameter in module.parameters
    )
    return replace(module, parameters=parameters, host_waits=frozen.product_dtype == int8.TYPE)


def _mark_fp32(modules: Iterable[Module]) -> Iterator[Module]:
    """A block's modules, `in_fp32` from a norm of the fp32 stream to the core of attention, which autocast
    runs in 16 bits.

    A product in 4 bits gives back the type that it gets, and PEFT's sum the wider one.
    """
    is_wide = False
    for module in modules:
        if module.role in (Role.NORM, Role.MIXER):
            is_wide = module.role is Role.NORM
        is_packed = module.role is Role.PRODUCT and any(
            parameter.is_packed for parameter in module.parameters
        )
        keeps = is_packed or module.op_spec.keeps_input_type
        yield replace(module, in_fp32=True) if is_wide and keeps else module


def _freeze_parameter(parameter: Parameter, name: str, frozen: FrozenParameters) -> Parameter:
    if not frozen.is_frozen(name):
        if not frozen.all_but_adapters or ".lora_" in name:
            return parameter
        original_dtype = frozen.stored_dtype or "as stored" if frozen.keeps_originals else ""
        return replace(parameter, stored_dtype=frozen.saved_dtype, original_dtype=original_dtype)
    return replace(parameter, trainable=False, stored_dtype=parameter.stored_dtype or frozen.stored_dtype)


def _mark_gradient_flow(model: ModelSpec, frozen: FrozenParameters) -> ModelSpec:
    """Marks the modules whose input needs no gradient, from the embedding to the first trained parameter."""
    flows = frozen.inputs_require_gradients or any(module.trainable_numel for module in model.before)
    towers = []
    for tower in model.towers:
        marked, flows = _mark_tower(tower, starts=frozen.patches_require_gradients, is_text_reached=flows)
        towers.append(marked)
    blocks, flows = _mark_blocks(model.blocks, flows)
    after = model.after if flows else _mark_missing_gradients(model.after)
    before = tuple(
        replace(module, input_gradient=False) if module.role is Role.EMBEDDING else module
        for module in model.before
    )
    return replace(model, before=before, towers=tuple(towers), blocks=blocks, after=tuple(after))


def _mark_tower(tower: Tower, *, starts: bool, is_text_reached: bool) -> tuple[Tower, bool]:
    """The tower with its modules marked, and whether a gradient flows into the tokens after it. Pixels need
    none. The last module puts its features among the embeddings of tokens, whose gradient flows where
    `is_text_reached`.
    """
    flows = starts or any(module.trainable_numel for module in tower.before)
    blocks, flows = _mark_blocks(tower.blocks, flows)
    *projector, scatter = tower.after
    if not flows:
        projector = list(_mark_missing_gradients(projector))
    flows |= is_text_reached or any(module.trainable_numel for module in projector)
    scatter = scatter if flows else replace(scatter, input_gradient=False)
    before = _mark_missing_gradients(tower.before)
    return replace(tower, before=before, blocks=blocks, after=(*projector, scatter)), flows


def _mark_blocks(blocks: Sequence[Block], flows: bool) -> tuple[tuple[Block, ...], bool]:
    """The blocks, marked up to the first trained one, and whether a gradient flows after them."""
    marked_blocks: dict[int, Block] = {}
    marked: list[Block] = []
    for block in blocks:
        if flows:
            marked.append(block)
            continue
        if id(block) not in marked_blocks:
            marked_blocks[id(block)] = replace(block, modules=_mark_missing_gradients(block.modules))
        marked.append(marked_blocks[id(block)])
        flows = block.trainable_numel > 0
    return tuple(marked), flows


def _mark_missing_gradients(modules: Sequence[Module]) -> tuple[Module, ...]:
    """Modules after a stream without a gradient, marked where their input needs none.

    A branch begins at the stream and ends in its sum. Products that share an input, and adapters, read what
    the first of them reads.
    """
    return tuple(_iterate_marked(modules))


def _iterate_marked(modules: Iterable[Module]) -> Iterable[Module]:
    stream = branch = shared = False
    for module in modules:
        is_product = module.role is Role.PRODUCT
        if module.role is Role.RESIDUAL:
            needs = stream or branch
            stream, branch = needs, False
        elif module.op_spec.reads_adapted_input or (is_product and module.shares_input):
            needs = shared
        else:
            needs = stream or branch
            is_first = is_product and ".lora_B." not in module.name
            shared = needs if is_first else shared
        branch |= needs or module.trainable_numel > 0
        yield module if needs else replace(module, input_gradient=False)
