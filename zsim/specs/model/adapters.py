"""A model with low-rank adapters on its products (Hu et al. 2021, arXiv 2106.09685), as PEFT builds them.

A product `q_proj` becomes, in the order in which PEFT 0.21.2's `Linear.forward` (tuners/lora/layer.py) runs:
`q_proj.base_layer` (the frozen product), `q_proj.lora_dropout` (cast and dropout of its input, where there
are any), `q_proj.lora_A` (to `rank`), `q_proj.lora_B` (from it), and `q_proj` itself: scale, add, cast back.
Routed experts: `zsim.specs.model.expert_adapters`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import field, replace

from zsim.dataclass import dataclass
from zsim.errors import InputError
from zsim.specs.model.expert_adapters import Adapted, products_of, with_expert_adapters, with_router_adapter
from zsim.specs.model.experts import ExpertAdapterKind, Experts, Router
from zsim.specs.model.spec import AdapterInput, AdapterSum, Block, Linear, ModelSpec, Module, Parameter

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, slots=True)
class Adapters:
    """Low-rank adapters on a model's products."""

    rank: int
    targets: tuple[str, ...]
    """Names of modules, or their last parts. ("all-linear",) for every product of the blocks. A pattern, if
    `is_pattern`.
    """
    is_pattern: bool = False
    """The target is a regular expression for the whole name."""
    dropout: float = 0.0
    ranks: Mapping[str, int] = field(default_factory=dict)
    """The rank by pattern, where ranks differ (`rank_pattern`)."""
    layers: tuple[int, ...] = ()
    """Numbers of the blocks that are adapted. Empty for all."""
    excludes: tuple[str, ...] = ()
    """Modules that get no adapter, named as `targets` are."""
    is_exclude_pattern: bool = False
    saved: tuple[str, ...] = ()
    """Parts of names of modules that are trained completely, which get no adapter either (PEFT 0.21.2
    tuners/tuners_utils.py `check_target_module_exists`).
    """
    stored: str = ""
    """The type that the adapters are kept in. Empty for the framework's."""
    computed: str = ""
    """The type of the adapters' products, if it is not the training's."""
    recasts: bool = False
    """Autocast casts back what the adapter has cast to fp32."""
    parameters: tuple[str, ...] = ()
    """Names or ends of names of stacked experts' weights (`target_parameters`)."""
    experts: ExpertAdapterKind | None = None
    """The kind of adapters on routed experts. None if they have none."""
    routers_are_linear: bool = False
    """A router is a linear layer like others."""

    def rank_of(self, name: str) -> int:
        """The rank of a module's adapter: PEFT's `rank_pattern` matches the end of a name."""
        for pattern, rank in self.ranks.items():
            if matches_pattern(name, pattern):
                return rank
        return self.rank

    def is_excluded(self, name: str) -> bool:
        """Whether a module, or a weight of experts, gets no adapter whatever targets it."""
        if self.is_exclude_pattern:
            is_named = re.fullmatch(self.excludes[0], name) is not None
        else:
            is_named = is_named_by(name, self.excludes)
        return is_named or any(re.match(rf"(^|.*\.){one}($|\..*)", name) for one in self.saved)

    def is_target(self, module: Module, name: str) -> bool:
        """Whether the module with the full name `name` gets an adapter."""
        is_linear = isinstance(module.work, Linear) or (
            self.routers_are_linear and isinstance(module.work, Router)
        )
        if not is_linear or self.is_excluded(name):
            return False
        if self.targets == (ALL_LINEAR,):
            return module.name != "lm_head" and bool(module.parameters)
        if self.is_pattern:
            return re.fullmatch(self.targets[0], name) is not None
        return is_named_by(name, self.targets)

    def on_experts(self, module: Module, name: str) -> tuple[tuple[Adapted, int], ...]:
        """The products of a layer of routed experts that get an adapter, each with its rank."""
        if self.experts is None or not isinstance(module.work, Experts):
            return ()
        targets = self.parameters if self.experts == "merged" else self.targets
        return tuple(
            (one, self.rank_of(one.name))
            for one in products_of(module, name, self.experts)
            if is_named_by(one.name, targets) and not self.is_excluded(one.name)
        )

    def is_on_router(self, module: Module, name: str) -> bool:
        """Whether a router's weight gets an adapter."""
        is_merged = self.experts == "merged" and isinstance(module.work, Router)
        return is_merged and is_named_by(f"{name}.weight", self.parameters)


def matches_pattern(name: str, pattern: str) -> bool:
    """Whether a full name, or its end after a dot, matches a regular expression (PEFT 0.21.2 utils/other.py
    `get_pattern_key`).
    """
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


def is_named_by(name: str, targets: Sequence[str]) -> bool:
    """Whether a module's full name is one of `targets`, or ends with one."""
    return any(name == target or name.endswith(f".{target}") for target in targets)


def with_adapters(model: ModelSpec, adapters: Adapters) -> tuple[ModelSpec, frozenset[str]]:
    """The model with adapters, and the full names of the modules and weights that got one.

    Blocks that were one object stay one.

    Raises InputError for a rank beyond a product's width.
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
            f"{name}.weight" if isinstance(module.work, Router) and not adapters.routers_are_linear else name
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
    return replace(model, blocks=tuple(blocks), after=tuple(after)), frozenset(found)


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
        if isinstance(module.work, Linear | Router) and not module.shares_input:
            holds_input = False
        if adapters.experts and (products := stacked.get(module.name)):
            casts = bool(adapters.computed or adapters.recasts)
            module = with_expert_adapters(module, products, adapters.experts, adapters.stored, casts=casts)
        if not is_adapted:
            modules.append(module)
            continue
        if isinstance(module.work, Router) and not adapters.routers_are_linear:
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
    """Whether an adapter's first product keeps the very tensor that the adapted product reads."""
    return not (adapters.dropout or adapters.computed or adapters.recasts)


def _adapted(module: Module, name: str, adapters: Adapters, *, holds_input: bool = False) -> list[Module]:
    work = module.work
    assert isinstance(work, Linear | Router)
    rank, inputs = adapters.rank_of(name), work.in_features
    outputs = work.num_experts if isinstance(work, Router) else work.out_features
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
    own, parts = adapters.stored, list[Module]()
    if not _keeps_plain_input(adapters):
        given = AdapterInput(inputs, adapters.dropout, adapters.computed, adapters.recasts)
        parts.append(Module(f"{module.name}.lora_dropout.default", given))
    down = Linear(inputs, rank, dtype=adapters.computed, is_adapter=True)
    up = Linear(rank, outputs, dtype=adapters.computed)
    first = Parameter("weight", (rank, inputs), stored=own)
    second = Parameter("weight", (outputs, rank), stored=own)
    parts += [
        Module(f"{module.name}.lora_A.default", down, (first,), holds_input),
        Module(f"{module.name}.lora_B.default", up, (second,)),
        Module(module.name, AdapterSum(outputs, adapters.computed)),
    ]
    shards, rows = module.token_shards, module.rows_per_token
    return [base, *(replace(one, token_shards=shards, rows_per_token=rows) for one in parts)]


def is_frozen(name: str, patterns: Sequence[str]) -> bool:
    """Whether a parameter's full name matches one of `patterns`.

    These are shell wildcards, of the name or of a part of it that ends before a dot (`model.embed_tokens`).
    """
    return any(
        fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern}.*")
        for pattern in patterns
    )


def is_adapter_part(module: Module) -> bool:
    """Whether a module is a part of an adapter."""
    return isinstance(module.work, AdapterInput | AdapterSum) or ".lora_" in module.name
