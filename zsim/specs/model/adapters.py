"""A model with low-rank adapters on its products (Hu et al. 2021, arXiv 2106.09685), as PEFT builds them.

A product `q_proj` becomes, in the order in which PEFT 0.21.2's `Linear.forward` (tuners/lora/layer.py) runs:
`q_proj.base_layer` (the frozen product), `q_proj.lora_dropout` (cast and dropout of its input, where there
are any), `q_proj.lora_A` (to `rank`), `q_proj.lora_B` (from it), and `q_proj` itself: scale, add, cast back.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace

from zsim.dataclass import dataclass
from zsim.errors import InputError, nearest
from zsim.specs.model.spec import AdapterInput, AdapterSum, Block, Linear, ModelSpec, Module, Parameter

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, slots=True)
class Adapters:
    """`targets`: names of modules, or their last parts; ("all-linear",) every product of the blocks; a
    pattern, if `is_pattern` (a regular expression for the whole name). `ranks`: by pattern, where they differ
    (`rank_pattern`). `layers`: numbers of the blocks that are adapted, () for all. `stored`: the type that
    the adapters are kept in ("": the framework's). `computed`: the type of their products, if it is not the
    training's; `recasts`: autocast casts what the adapter has cast to fp32 back."""

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


def _is_named(name: str, targets: Sequence[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def with_adapters(model: ModelSpec, adapters: Adapters) -> ModelSpec:
    """The model with adapters; blocks that were one object stay one object.

    Raises InputError for a target that names no product, and for a rank beyond a product's width.
    """
    made: dict[tuple[int, tuple[bool, ...]], Block] = {}
    blocks = []
    found: set[str] = set()
    for number, block in enumerate(model.blocks, model.first_block):
        names = [f"{model.block_prefix}.{number}.{module.name}" for module in block.modules]
        is_here = not adapters.layers or number in adapters.layers
        flags = tuple(
            is_here and adapters.is_target(module, name)
            for module, name in zip(block.modules, names, strict=True)
        )
        found |= {name for name, is_adapted in zip(names, flags, strict=True) if is_adapted}
        key = id(block), flags
        if key not in made:
            made[key] = _adapted_block(block, names, flags, adapters)
        blocks.append(made[key])
    after: list[Module] = []
    for module in model.after:
        is_adapted = adapters.is_target(module, module.name) and bool(module.parameters)
        found |= {module.name} if is_adapted else set()
        after += _adapted(module, module.name, adapters) if is_adapted else [module]
    _check_targets(model, adapters, found)
    return replace(model, blocks=tuple(blocks), after=tuple(after))


def _adapted_block(block: Block, names: Sequence[str], flags: Sequence[bool], adapters: Adapters) -> Block:
    modules: list[Module] = []
    expanded: dict[str, list[str]] = {}
    holds_input = False  # whether an earlier module of the same input keeps it for backward
    for module, name, is_adapted in zip(block.modules, names, flags, strict=True):
        if isinstance(module.work, Linear) and not module.shares_input:
            holds_input = False
        if not is_adapted:
            modules.append(module)
            continue
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
    missing = [target for target in asked if not any(_is_named(name, (target,)) for name in found)]
    if not missing and found:
        return
    name = missing[0] if missing else adapters.targets[0]
    near = nearest(name.rpartition(".")[2], products)
    hint = f"; did you mean '{near}'" if near else ""
    raise InputError(
        f"training.lora.targets: '{name}' matches no product of '{model.name}'{hint}; its products are "
        f'{", ".join(products)}, and "all-linear" means all of them but the head'
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
