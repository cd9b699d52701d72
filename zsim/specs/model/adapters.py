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
from dataclasses import dataclass, field, replace

from zsim.errors import InputError, NotSimulatedError
from zsim.operations.experts import ExpertAdapterKind, Experts
from zsim.operations.operation import Role
from zsim.operations.router import Router
from zsim.specs.model.expert_adapters import (
    ExpertTarget,
    adaptable_products,
    add_expert_adapters,
    add_router_adapter,
)
from zsim.specs.model.spec import (
    AdapterInput,
    AdapterSum,
    Block,
    Linear,
    ModelSpec,
    Module,
    Parameter,
    join_names,
)

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
    rank_patterns: Mapping[str, int] = field(default_factory=dict)
    """The rank by pattern, where ranks differ (`rank_pattern`)."""
    layers: tuple[int, ...] = ()
    """Numbers of the blocks that are adapted. Empty for all."""
    excludes: tuple[str, ...] = ()
    """Modules that get no adapter, named as `targets` are."""
    is_exclude_pattern: bool = False
    modules_to_save: tuple[str, ...] = ()
    """Parts of names of modules that are trained completely, which get no adapter either (PEFT 0.21.2
    tuners/tuners_utils.py `check_target_module_exists`).
    """
    stored_dtype: str = ""
    """The type that the adapters are kept in. Empty for the framework's."""
    compute_dtype: str = ""
    """The type of the adapters' products, if it is not the training's."""
    recasts: bool = False
    """Autocast casts back what the adapter has cast to fp32."""
    adds_in_product: bool = False
    """The second product adds to the frozen one's output (unsloth)."""
    products_keep_input: bool = False
    """Adapted products keep what they read, though their weights are frozen (bitsandbytes' of 8 bits)."""
    parameters: tuple[str, ...] = ()
    """Names or ends of names of stacked experts' weights (`target_parameters`)."""
    experts: ExpertAdapterKind | None = None
    """The kind of adapters on routed experts. None if they have none."""
    routers_are_linear: bool = False
    """A router is a linear layer like others."""

    def rank_of(self, name: str) -> int:
        """The rank of a module's adapter: PEFT's `rank_pattern` matches the end of a name."""
        for pattern, rank in self.rank_patterns.items():
            if matches_pattern(name, pattern):
                return rank
        return self.rank

    def is_excluded(self, name: str) -> bool:
        """Whether a module, or a weight of experts, gets no adapter whatever targets it."""
        if self.is_exclude_pattern:
            is_named = re.fullmatch(self.excludes[0], name) is not None
        else:
            is_named = is_named_by(name, self.excludes)
        return is_named or any(
            re.match(rf"(^|.*\.){saved_name}($|\..*)", name) for saved_name in self.modules_to_save
        )

    def is_target(self, module: Module, name: str) -> bool:
        """Whether the module with the full name `name` gets an adapter."""
        is_linear = module.role is Role.PRODUCT or (self.routers_are_linear and module.role is Role.ROUTER)
        if not is_linear or self.is_excluded(name):
            return False
        if self.targets == (ALL_LINEAR,):
            return module.name != "lm_head" and bool(module.parameters or module.lender)
        if self.is_pattern:
            return re.fullmatch(self.targets[0], name) is not None
        return is_named_by(name, self.targets)

    def expert_targets(self, module: Module, name: str) -> tuple[tuple[ExpertTarget, int], ...]:
        """The products of a layer of routed experts that get an adapter, each with its rank."""
        if self.experts is None or module.role is not Role.EXPERTS:
            return ()
        targets = self.parameters if self.experts == "merged" else self.targets
        return tuple(
            (product, self.rank_of(product.name))
            for product in adaptable_products(module, name, self.experts)
            if is_named_by(product.name, targets) and not self.is_excluded(product.name)
        )

    def is_on_router(self, module: Module, name: str) -> bool:
        """Whether a router's weight gets an adapter."""
        is_merged = self.experts == "merged" and module.role is Role.ROUTER
        return is_merged and is_named_by(f"{name}.weight", self.parameters)


def matches_pattern(name: str, pattern: str) -> bool:
    """Whether a full name, or its end after a dot, matches a regular expression (PEFT 0.21.2 utils/other.py
    `get_pattern_key`).
    """
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


def is_named_by(name: str, targets: Sequence[str]) -> bool:
    """Whether a module's full name is one of `targets`, or ends with one."""
    return any(name == target or name.endswith(f".{target}") for target in targets)


def add_adapters(model: ModelSpec, adapters: Adapters) -> tuple[ModelSpec, frozenset[str]]:
    """The model with adapters, and the full names of the modules and weights that got one.

    Blocks that were one object stay one.

    Raises InputError for a rank beyond a product's width.
    """
    adapted_names: set[str] = set()
    names = [
        model.block_name(number) for number in range(model.first_block, model.first_block + len(model.blocks))
    ]
    blocks = _adapt_blocks(model.blocks, names, model.first_block, adapters, adapted_names)
    after = _adapt_outer(model.after, adapters, adapted_names)
    towers = []
    for tower in model.towers:
        names = [tower.block_name(number) for number in range(len(tower.blocks))]
        adapted_blocks = _adapt_blocks(tower.blocks, names, 0, adapters, adapted_names)
        before, last = (_adapt_outer(outer, adapters, adapted_names) for outer in (tower.before, tower.after))
        towers.append(replace(tower, before=before, blocks=adapted_blocks, after=last))
    return replace(model, towers=tuple(towers), blocks=blocks, after=after), frozenset(adapted_names)


def _adapt_outer(
    modules: Sequence[Module], adapters: Adapters, adapted_names: set[str]
) -> tuple[Module, ...]:
    """Modules outside the blocks, with adapters on those that are linear layers, not convolutions, with a
    weight of their own.
    """
    adapted: list[Module] = []
    for module in modules:
        is_linear = module.has_weight and len(module.parameters[0].shape) == 2
        is_adapted = is_linear and adapters.is_target(module, module.name)
        adapted_names |= {module.name} if is_adapted else set()
        adapted += _adapter_modules(module, module.name, adapters) if is_adapted else [module]
    return tuple(adapted)


def _adapt_blocks(
    blocks: Sequence[Block],
    block_names: Sequence[str],
    first: int,
    adapters: Adapters,
    adapted_names: set[str],
) -> tuple[Block, ...]:
    """The blocks with adapters. The names of what got one are added to `adapted_names`."""
    adapted_blocks: dict[tuple[int, tuple[int, ...]], Block] = {}
    adapted: list[Block] = []
    for number, (block, block_name) in enumerate(zip(blocks, block_names, strict=True), first):
        names = [join_names(block_name, module.name) for module in block.modules]
        for module in block.modules:
            if module.lender and adapters.is_target(module, module.lender):
                raise NotSimulatedError(
                    f"training.lora.targets: '{module.lender}' is in a block that layers share, on which "
                    "zsim does not simulate adapters; expected others, as in_proj and out_proj"
                )
        is_adapted_layer = not adapters.layers or number in adapters.layers
        flags = tuple(
            is_adapted_layer and (adapters.is_target(module, name) or adapters.is_on_router(module, name))
            for module, name in zip(block.modules, names, strict=True)
        )
        adapted_names |= {
            f"{name}.weight" if module.role is Role.ROUTER and not adapters.routers_are_linear else name
            for module, name, is_adapted in zip(block.modules, names, flags, strict=True)
            if is_adapted
        }
        stacked = {
            module.name: adapters.expert_targets(module, name) if is_adapted_layer else ()
            for module, name in zip(block.modules, names, strict=True)
            if module.role is Role.EXPERTS
        }
        adapted_names |= {product.name for products in stacked.values() for product, _ in products}
        key = id(block), (*flags, *(rank for products in stacked.values() for _, rank in products))
        if key not in adapted_blocks:
            adapted_blocks[key] = _adapted_block(block, names, flags, adapters, stacked)
        adapted.append(adapted_blocks[key])
    return tuple(adapted)


def _adapted_block(
    block: Block,
    names: Sequence[str],
    flags: Sequence[bool],
    adapters: Adapters,
    stacked: Mapping[str, Sequence[tuple[ExpertTarget, int]]],
) -> Block:
    modules: list[Module] = []
    expanded: dict[str, list[str]] = {}
    holds_input = False  # whether an earlier module of the same input keeps it for backward
    for module, name, is_adapted in zip(block.modules, names, flags, strict=True):
        if module.role in (Role.PRODUCT, Role.ROUTER) and not module.shares_input:
            holds_input = False
        if adapters.experts and (products := stacked.get(module.name)):
            casts = bool(adapters.compute_dtype or adapters.recasts)
            module = add_expert_adapters(
                module, products, adapters.experts, adapters.stored_dtype, casts=casts
            )
        if not is_adapted:
            modules.append(module)
            continue
        if module.role is Role.ROUTER and not adapters.routers_are_linear:
            casts, rank = bool(adapters.compute_dtype or adapters.recasts), adapters.rank_of(f"{name}.weight")
            adapted_modules = add_router_adapter(module, rank, adapters.stored_dtype, casts=casts)
        else:
            is_kept = holds_input or (adapters.products_keep_input and _keeps_plain_input(adapters))
            adapted_modules = _adapter_modules(module, name, adapters, holds_input=is_kept)
            holds_input |= _keeps_plain_input(adapters)
        modules += adapted_modules
        expanded[module.name] = [
            adapted_module.name for adapted_module in adapted_modules if adapted_module.parameters
        ]
    registration = block.registration
    if registration is not None:
        registration = tuple(
            adapted_name for name in registration for adapted_name in expanded.get(name, [name])
        )
    return Block(block.kind, tuple(modules), registration)


def _keeps_plain_input(adapters: Adapters) -> bool:
    """Whether an adapter's first product keeps the very tensor that the adapted product reads."""
    return not (adapters.dropout or adapters.compute_dtype or adapters.recasts)


def _adapter_modules(
    module: Module, name: str, adapters: Adapters, *, holds_input: bool = False
) -> list[Module]:
    rank, (inputs, outputs) = adapters.rank_of(name), module.op_spec.product_features
    if rank > max(inputs, outputs) and adapters.targets != (ALL_LINEAR,):  # PEFT itself has no limit
        raise InputError(
            f"training.lora.rank: found {rank:,}, but '{name}' is a product of {inputs:,} x {outputs:,}; "
            f"expected at most {max(inputs, outputs):,}"
        )
    base = replace(
        module,
        name=f"{module.name}.base_layer",
        parameters=tuple(replace(parameter, trainable=False) for parameter in module.parameters),
    )
    stored_dtype, adapter_modules = adapters.stored_dtype, list[Module]()
    if not _keeps_plain_input(adapters):
        adapter_input = AdapterInput(inputs, adapters.dropout, adapters.compute_dtype, adapters.recasts)
        adapter_modules.append(Module(f"{module.name}.lora_dropout.default", adapter_input))
    down = Linear(inputs, rank, dtype=adapters.compute_dtype, is_adapter=True)
    up = Linear(rank, outputs, dtype=adapters.compute_dtype)
    first = Parameter("weight", (rank, inputs), stored_dtype=stored_dtype)
    second = Parameter("weight", (outputs, rank), stored_dtype=stored_dtype)
    adapter_modules += [
        Module(f"{module.name}.lora_A.default", down, (first,), holds_input),
        Module(f"{module.name}.lora_B.default", up, (second,)),
        Module(module.name, AdapterSum(outputs, adapters.compute_dtype, adapters.adds_in_product)),
    ]
    shards, rows, sample_rows = module.token_shards, module.rows_per_token, module.sample_rows
    return [
        base,
        *(
            replace(adapter_module, token_shards=shards, rows_per_token=rows, sample_rows=sample_rows)
            for adapter_module in adapter_modules
        ),
    ]


def base_model(model: ModelSpec) -> ModelSpec:
    """The model whose adapters are switched off, which leaves the frozen weights alone to run (PEFT 0.21.2
    peft_model.py `disable_adapter`).
    """
    blocks: dict[int, Block] = {}
    for block in model.blocks:
        if id(block) not in blocks:
            kept = [
                _base_module(module)
                for module in block.modules
                if ".lora_" not in module.name and not isinstance(module.op_spec, AdapterSum)
            ]
            names = {module.name for module in kept}
            order = block.registration and tuple(name for name in block.registration if name in names)
            blocks[id(block)] = replace(block, modules=tuple(kept), registration=order)
    return replace(model, blocks=tuple(blocks[id(block)] for block in model.blocks))


def _base_module(module: Module) -> Module:
    """The module without adapters inside."""
    op_spec = module.op_spec
    if isinstance(op_spec, Router):
        return replace(module, op_spec=replace(op_spec, is_merged=False))
    if isinstance(op_spec, Experts) and op_spec.adapters is not None:
        parameters = tuple(p for p in module.parameters if "lora_" not in p.name)
        return replace(module, op_spec=replace(op_spec, adapters=None), parameters=parameters)
    return module


def is_frozen(name: str, patterns: Sequence[str]) -> bool:
    """Whether a parameter's full name matches one of `patterns`.

    These are shell wildcards, of the name or of a part of it that ends before a dot (`model.embed_tokens`).
    """
    return any(
        fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern}.*")
        for pattern in patterns
    )
