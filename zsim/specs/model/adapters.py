"""A model with low-rank adapters on its products (Hu et al. 2021, arXiv 2106.09685), as PEFT builds them.

A product `q_proj` becomes, in the order in which PEFT 0.21.2's `Linear.forward` (tuners/lora/layer.py) runs:
`q_proj.base_layer` (the frozen product), `q_proj.lora_dropout` (cast and dropout of its input, where there
are any), `q_proj.lora_A` (to `rank`), `q_proj.lora_B` (from it), and `q_proj` itself: scale, add, cast back.
Routed experts: `zsim.specs.model.expert_adapters`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace

from zsim.dataclass import dataclass
from zsim.errors import InputError, nearest
from zsim.specs.model.expert_adapters import Adapted, products_of, with_expert_adapters, with_router_adapter
from zsim.specs.model.experts import ExpertAdapterKind, Experts, Router
from zsim.specs.model.spec import AdapterInput, AdapterSum, Block, Linear, ModelSpec, Module, Parameter

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, slots=True)
class Adapters:
    """`targets`: names of modules, or their last parts; ("all-linear",) every product of the blocks; a
    pattern, if `is_pattern` (a regular expression for the whole name). `ranks`: by pattern, where they differ
    (`rank_pattern`). `layers`: numbers of the blocks that are adapted, () for all. `stored`: the type that
    the adapters are kept in ("": the framework's). `computed`: the type of their products, if it is not the
    training's; `recasts`: autocast casts what the adapter has cast to fp32 back. `parameters`: names or ends
    of names of stacked experts' weights (`target_parameters`). `experts`: how routed experts are adapted;
    None: not."""

    rank: int
    targets: tuple[str, ...]
    is_pattern: bool = False
    dropout: float = 0.0
    ranks: Mapping[str, int] = field(default_factory=dict)
    layers: tuple[int, ...] = ()
    excludes: tuple[str, ...] = ()
    stored: str = ""
    computed: str = ""
    recasts: bool = False
    parameters: tuple[str, ...] = ()
    experts: ExpertAdapterKind | None = None

    def rank_of(self, name: str) -> int:
        """The rank of a module's adapter: PEFT's `rank_pattern` matches the end of a name."""
        for pattern, rank in self.ranks.items():
            if re.match(rf"(.*\.)?({pattern})$", name):
                return rank
        return self.rank

    def is_target(self, module: Module, name: str) -> bool:
        """Whether a module gets an adapter; `name`: its full name."""
        if not isinstance(module.work, Linear) or _is_named(name, self.excludes):
            return False
        if self.targets == (ALL_LINEAR,):
            return module.name != "lm_head" and bool(module.parameters)
        if self.is_pattern:
            return re.fullmatch(self.targets[0], name) is not None
        return _is_named(name, self.targets)

    def on_experts(self, module: Module, name: str) -> tuple[tuple[Adapted, int], ...]:
        """The products of a layer of routed experts that get an adapter, each with its rank."""
        if self.experts is None or not isinstance(module.work, Experts):
            return ()
        targets = self.parameters if self.experts == "merged" else self.targets
        return tuple(
            (one, self.rank_of(one.name))
            for one in products_of(module, name, self.experts)
            if _is_named(one.name, targets) and not _is_named(one.name, self.excludes)
        )

    def is_on_router(self, module: Module, name: str) -> bool:
        """Whether a router's weight gets an adapter."""
        is_merged = self.experts == "merged" and isinstance(module.work, Router)
        return is_merged and _is_named(f"{name}.weight", self.parameters)


def _is_named(name: str, targets: Sequence[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def with_adapters(model: ModelSpec, adapters: Adapters) -> ModelSpec:
    """The model with adapters; blocks that were one object stay one object.

    Raises InputError for a target that names no product, and for a rank beyond a product's width.
    """
    made: dict[tuple[int, tuple[int, ...]], Block] = {}
    blocks = []
    found: set[str] = set()
    for number, block in enumerate(model.blocks, model.first_block):
        names = [f"{model.block_prefix}.{number}.{module.name}" for module in block.modules]
        is_here = not adapters.layers or number in adapters.layers
        flags = tuple(
            is_here and (adapters.is_target(module, name) or adapters.is_on_router(module, name))
            for module, name in zip(block.modules, names, strict=True)
        )
        found |= {
            f"{name}.weight" if isinstance(module.work, Router) else name
            for module, name, is_adapted in zip(block.modules, names, flags, strict=True)
            if is_adapted
        }
        stacked = {
            module.name: adapters.on_experts(module, name) if is_here else ()
            for module, name in zip(block.modules, names, strict=True)
            if isinstance(module.work, Experts)
        }
        found |= {product.name for products in stacked.values() for product, _ in products}
        key = id(block), (*flags, *(rank for products in stacked.values() for _, rank in products))
        if key not in made:
            made[key] = _adapted_block(block, names, flags, adapters, stacked)
        blocks.append(made[key])
    after: list[Module] = []
    for module in model.after:
        is_adapted = adapters.is_target(module, module.name) and bool(module.parameters)
        found |= {module.name} if is_adapted else set()
        after += _adapted(module, module.name, adapters) if is_adapted else [module]
    _check_targets(model, adapters, found)
    return replace(model, blocks=tuple(blocks), after=tuple(after))


def _adapted_block(
    block: Block,
    names: Sequence[str],
    flags: Sequence[bool],
    adapters: Adapters,
    stacked: Mapping[str, Sequence[tuple[Adapted, int]]],
) -> Block:
    modules: list[Module] = []
    expanded: dict[str, list[str]] = {}
    holds_input = False  # whether an earlier module of the same input keeps it for backward
    for module, name, is_adapted in zip(block.modules, names, flags, strict=True):
        if isinstance(module.work, Linear) and not module.shares_input:
            holds_input = False
        if adapters.experts and (products := stacked.get(module.name)):
            casts = bool(adapters.computed or adapters.recasts)
            module = with_expert_adapters(module, products, adapters.experts, adapters.stored, casts=casts)
        if not is_adapted:
            modules.append(module)
            continue
        if isinstance(module.work, Router):
            casts, rank = bool(adapters.computed or adapters.recasts), adapters.rank_of(f"{name}.weight")
            parts = with_router_adapter(module, rank, adapters.stored, casts=casts)
        else:
            parts = _adapted(module, name, adapters, holds_input=holds_input)
            holds_input |= _keeps_plain_input(adapters)
        modules += parts
        expanded[module.name] = [part.name for part in parts if part.parameters]
    registration = block.registration
    if registration is not None:
        registration = tuple(part for name in registration for part in expanded.get(name, [name]))
    return Block(block.kind, tuple(modules), registration)


def _keeps_plain_input(adapters: Adapters) -> bool:
    """Whether an adapter's first product keeps the very tensor that the product beside it reads."""
    return not (adapters.dropout or adapters.computed or adapters.recasts)


def _adapted(module: Module, name: str, adapters: Adapters, *, holds_input: bool = False) -> list[Module]:
    work = module.work
    assert isinstance(work, Linear)
    rank, inputs, outputs = adapters.rank_of(name), work.in_features, work.out_features
    if rank > min(inputs, outputs):
        raise InputError(
            f"training.lora.rank: found {rank:,}, but '{name}' is a product of {inputs:,} x {outputs:,}; "
            f"expected at most {min(inputs, outputs):,}"
        )
    base = replace(
        module,
        name=f"{module.name}.base_layer",
        parameters=tuple(replace(one, trainable=False) for one in module.parameters),
    )
    shards, own = module.token_shards, adapters.stored
    parts = [base]
    if not _keeps_plain_input(adapters):
        given = AdapterInput(inputs, adapters.dropout, adapters.computed, adapters.recasts)
        parts.append(Module(f"{module.name}.lora_dropout.default", given, token_shards=shards))
    down = Linear(inputs, rank, dtype=adapters.computed, is_adapter=True)
    up = Linear(rank, outputs, dtype=adapters.computed)
    first = Parameter("weight", (rank, inputs), stored=own)
    second = Parameter("weight", (outputs, rank), stored=own)
    parts += [
        Module(f"{module.name}.lora_A.default", down, (first,), holds_input, shards),
        Module(f"{module.name}.lora_B.default", up, (second,), token_shards=shards),
        Module(module.name, AdapterSum(outputs, adapters.computed), token_shards=shards),
    ]
    return parts


def _products(model: ModelSpec) -> Iterator[str]:
    """Names of the products of the blocks, and of the head."""
    for module in (*(model.blocks[0].modules if model.blocks else ()), *model.after):
        if isinstance(module.work, Linear):
            yield module.name


def _check_targets(model: ModelSpec, adapters: Adapters, found: set[str]) -> None:
    """Raises InputError for targets that match nothing; names the model's products."""
    products = list(dict.fromkeys(name.rpartition(".")[2] for name in _products(model)))
    asked = () if adapters.is_pattern or adapters.targets == (ALL_LINEAR,) else adapters.targets
    _check_parameters(model, adapters, found)
    missing = [
        target
        for target in asked
        if not any(_is_named(name, (target,)) for name in found) and not _is_named(target, adapters.excludes)
    ]
    if not missing and (found or adapters.parameters):
        return
    if not adapters.targets:
        raise InputError(
            f"training.lora.targets: found none, expected products of '{model.name}': {', '.join(products)}, "
            f'or "{ALL_LINEAR}"'
        )
    if not missing and adapters.excludes:
        raise InputError(
            "training.lora.exclude: leaves no product that gets an adapter; expected fewer names"
        )
    name = missing[0] if missing else adapters.targets[0]
    near = nearest(name.rpartition(".")[2], products)
    hint = f"; did you mean '{near}'" if near else ""
    raise InputError(
        f"training.lora.targets: '{name}' matches no product of '{model.name}'{hint}; its products are "
        f'{", ".join(products)}, and "all-linear" means all of them but the head'
    )


def _check_parameters(model: ModelSpec, adapters: Adapters, found: set[str]) -> None:
    """Raises InputError for `target_parameters` that match nothing; names the model's stacked weights."""
    full = [
        one.name
        for module in (model.blocks[-1].modules if model.blocks else ())
        for one in products_of(module, module.name, "merged")
        if isinstance(module.work, Experts)
    ]
    for target in adapters.parameters:
        if any(_is_named(name, (target,)) for name in found):
            continue
        near = nearest(target.rpartition(".")[2], [name.rpartition(".")[2] for name in full])
        hint = f"; did you mean '{near}'" if near else ""
        stacked = f"; its stacked weights are {', '.join(full)}" if full else ", which has no experts"
        raise InputError(
            f"training.lora.target_parameters: '{target}' matches no stacked weight of experts of "
            f"'{model.name}'{hint}{stacked}"
        )


def is_frozen(name: str, patterns: Sequence[str]) -> bool:
    """Whether a parameter's full name matches one of `patterns`: shell wildcards, of the name or of a part
    of it that ends before a dot (`model.embed_tokens`)."""
    return any(
        fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern}.*")
        for pattern in patterns
    )


def is_adapter_part(module: Module) -> bool:
    """Whether a module is a part of an adapter."""
    return isinstance(module.work, AdapterInput | AdapterSum) or ".lora_" in module.name
