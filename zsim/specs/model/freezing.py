"""A model with frozen parameters, and the modules of it that autograd still runs backward.

A gradient flows to a module's input only if something before it is trained. Nothing before the first
trainable parameter has a backward, and the frozen products after it have no product for their weight's
gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from zsim.dataclass import dataclass
from zsim.errors import InputError, did_you_mean
from zsim.specs.model.adapters import is_frozen
from zsim.specs.model.experts import Router
from zsim.specs.model.spec import (
    Activation,
    AdapterInput,
    AdapterSum,
    Attention,
    Block,
    Embedding,
    Linear,
    ModelSpec,
    Module,
    Norm,
    Parameter,
    Residual,
)


@dataclass(frozen=True, slots=True)
class Frozen:
    """The choice of a model's frozen parameters, and the types that they are kept in."""

    patterns: tuple[str, ...] = ()
    """Patterns of full parameter names."""
    all_but_adapters: bool = False
    """Every parameter is frozen but those of adapters, and those that `modules_to_save` matches."""
    keeps: tuple[str, ...] = ()
    """Names of modules that are trained (PEFT's `modules_to_save`)."""
    copies: bool = False
    """The frozen originals of these modules stay in memory, too."""
    stored: str = ""
    """The type that frozen weights are kept in. Empty for the framework's."""
    products_stored: str = ""
    """The type of the weights of the blocks' products ("nf4": 4 bits, as bitsandbytes replaces every product
    but the head).
    """
    quantises_routers: bool = False
    """Routers are quantised, too."""
    has_fp32_stream: bool = False
    """The residual stream is fp32, and so are the outputs of quantised products."""
    inputs_require_gradients: bool = False
    """transformers' `enable_input_require_grads`."""

    def is_frozen(self, name: str) -> bool:
        """Whether the parameter of this full name is frozen."""
        if is_frozen(name, self.patterns):
            return True
        if not self.all_but_adapters or ".lora_" in name:
            return False
        return not any(is_saved(name, kept) for kept in self.keeps)


def is_saved(name: str, kept: str) -> bool:
    """Whether a parameter is of a module whose name ends with `module_name`.

    PEFT 0.21.2 utils/other.py `_set_trainable`: "head" is `lm_head` as well.
    """
    parts = name.split(".")
    return any(".".join(parts[:end]).endswith(kept) for end in range(1, len(parts)))


def with_frozen(model: ModelSpec, frozen: Frozen) -> ModelSpec:
    """The model with `frozen` parameters. Blocks whose frozen parameters are identical stay one object.

    Raises InputError for a pattern that matches no parameter, and if nothing is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in frozen.patterns:
        if not any(is_frozen(name, (pattern,)) for name in names):
            some = ", ".join(names[:3])
            parts = dict.fromkeys(
                name.rsplit(".", number)[0] for name in names for number in range(name.count(".") + 1)
            )
            raise InputError(
                f"training.frozen: '{pattern}' matches no parameter of '{model.name}'"
                f"{did_you_mean(pattern, parts)}; expected patterns of names like {some}"
            )
    before = [_frozen(module, module.name, frozen) for module in model.before]
    after = [_frozen(module, module.name, frozen) for module in model.after]
    made: dict[tuple[int, tuple[bool, ...]], Block] = {}
    blocks = []
    for number, block in enumerate(model.blocks, model.first_block):
        prefix = f"{model.block_prefix}.{number}."
        flags = tuple(
            frozen.is_frozen(f"{prefix}{module.name}.{one.name}")
            for module in block.modules
            for one in module.parameters
        )
        key = id(block), flags
        if key not in made:
            modules = tuple(_in_block(one, prefix + one.name, frozen) for one in block.modules)
            modules = tuple(_in_fp32(modules)) if frozen.has_fp32_stream else modules
            made[key] = replace(block, modules=modules)
        blocks.append(made[key])
    lenders = before if model.is_tied else after
    after = [_borrowing(one, before if isinstance(one.work, Embedding) else lenders) for one in after]
    result = replace(model, before=tuple(before), blocks=tuple(blocks), after=tuple(after))
    if not result.trainable_numel:
        raise InputError(f"training.frozen: no parameter of '{model.name}' is left to train")
    return _with_gradient_flow(result, starts=frozen.inputs_require_gradients)


def _borrowing(module: Module, lenders: Sequence[Module]) -> Module:
    """The module, marked if it uses the frozen weight of a lender.

    Such modules are a tied head, and the head and embedding of multi-token prediction. The weight is the
    first of its size, not a later one of positions or types.
    """
    numel = _weight_numel(module)
    if not numel or any(one.name == "weight" for one in module.parameters):
        return module
    weights = (
        one
        for lender in lenders
        if isinstance(lender.work, Linear | Embedding)
        for one in lender.parameters
        if one.name == "weight" or isinstance(lender.work, Embedding)
    )
    if next((one.trainable for one in weights if one.numel == numel), True):
        return module
    if isinstance(module.work, Embedding):
        return replace(module, borrows_frozen=True, input_gradient=False)
    return replace(module, borrows_frozen=True)


def _weight_numel(module: Module) -> int:
    """Elements of the weight of a product or an embedding, its own or another's."""
    work = module.work
    if isinstance(work, Linear):
        return work.in_features * work.out_features
    return work.rows * work.width if isinstance(work, Embedding) else 0


def _frozen(module: Module, name: str, frozen: Frozen) -> Module:
    if not module.parameters:
        return module
    parameters = tuple(_freeze(one, f"{name}.{one.name}", frozen) for one in module.parameters)
    return module if parameters == module.parameters else replace(module, parameters=parameters)


def _in_block(module: Module, name: str, frozen: Frozen) -> Module:
    kinds = (Linear, Router) if frozen.quantises_routers else Linear
    is_product = isinstance(module.work, kinds) and ".lora_" not in module.name
    module = _frozen(module, name, frozen)
    if not frozen.products_stored or not is_product or module.trains_weight:
        return module
    kept = tuple(
        replace(one, stored=frozen.products_stored) if len(one.shape) == 2 else one
        for one in module.parameters
    )
    return replace(module, parameters=kept)


def _in_fp32(modules: Iterable[Module]) -> Iterator[Module]:
    """A block's modules, `in_fp32` from a norm of the fp32 stream to the core of attention, which autocast
    runs in 16 bits.

    A product in 4 bits gives back the type that it gets, and PEFT's sum the wider one.
    """
    is_wide = False
    for module in modules:
        work = module.work
        if isinstance(work, Norm | Attention):
            is_wide = isinstance(work, Norm)
        is_packed = isinstance(work, Linear) and any(one.stored[:3] == "nf4" for one in module.parameters)
        keeps = is_packed or isinstance(work, Activation | AdapterInput | AdapterSum)
        yield replace(module, in_fp32=True) if is_wide and keeps else module


def _freeze(parameter: Parameter, name: str, frozen: Frozen) -> Parameter:
    if not frozen.is_frozen(name):
        is_copy = frozen.copies and ".lora_" not in name
        return replace(parameter, original=frozen.stored or "as stored") if is_copy else parameter
    return replace(parameter, trainable=False, stored=parameter.stored or frozen.stored)


def _with_gradient_flow(model: ModelSpec, *, starts: bool) -> ModelSpec:
    """Marks the modules whose input needs no gradient, from the embedding to the first trained parameter."""
    flows = starts or any(module.trainable_numel for module in model.before)
    made: dict[int, Block] = {}
    blocks: list[Block] = []
    for block in model.blocks:
        if flows:
            blocks.append(block)
            continue
        if id(block) not in made:
            made[id(block)] = replace(block, modules=_marked(block.modules))
        blocks.append(made[id(block)])
        flows = block.trainable_numel > 0
    after = model.after if flows else _marked(model.after)
    before = tuple(
        replace(one, input_gradient=False) if isinstance(one.work, Embedding) else one for one in model.before
    )
    return replace(model, before=before, blocks=tuple(blocks), after=tuple(after))


def _marked(modules: Sequence[Module]) -> tuple[Module, ...]:
    """Modules after a stream without a gradient, marked where their input needs none.

    A branch begins at the stream and ends in its sum. Products that share an input, and adapters, read what
    the first of them reads.
    """
    return tuple(_marks(modules))


def _marks(modules: Iterable[Module]) -> Iterable[Module]:
    stream = branch = shared = False
    for module in modules:
        work = module.work
        if isinstance(work, Residual):
            needs = stream or branch
            stream, branch = needs, False
        elif (
            isinstance(work, AdapterInput)
            or (isinstance(work, Linear) and work.is_adapter)
            or (isinstance(work, Linear) and module.shares_input)
        ):
            needs = shared
        elif isinstance(work, Attention | Activation | AdapterSum):
            needs = stream or branch
        else:
            needs = stream or branch
            is_first = isinstance(work, Linear) and ".lora_B." not in module.name
            shared = needs if is_first else shared
        branch |= needs or module.trainable_numel > 0
        yield module if needs else replace(module, input_gradient=False)
