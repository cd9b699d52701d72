"""The specification of a model: leaf modules, grouped into blocks.

ZeRO-3 fetches leaf modules, FSDP wraps blocks, so a model has both. `ModelSpec.blocks` has one entry per
transformer block, and entries of the same shape are the *same* `Block` object, so that work is derived once
per shape and not once per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from zsim.operations.activation import Activation
from zsim.operations.adapter_parts import AdapterInput, AdapterSum
from zsim.operations.attention.attention import Attention
from zsim.operations.attention.core import ScoreBias
from zsim.operations.embedding import Embedding
from zsim.operations.exchange import Exchange, ExchangeKind, ExchangeLibrary
from zsim.operations.linear import ChunkedOverlap, Linear, OverlappedCollectives
from zsim.operations.loss import Loss
from zsim.operations.norm import Norm
from zsim.operations.operation import Module, Operation, Parameter, Role, join_names, operations_of
from zsim.operations.residual import Residual
from zsim.operations.sharding import ContextLibrary, ContextMethod, ContextSharding
from zsim.operations.traced import CaptureInfo, Extent
from zsim.specs.model.image_rules import ImageRule, SoundRule

__all__ = [
    "Activation",
    "AdapterInput",
    "AdapterSum",
    "Attention",
    "Block",
    "ChunkedOverlap",
    "ContextLibrary",
    "ContextMethod",
    "ContextSharding",
    "Embedding",
    "Exchange",
    "ExchangeKind",
    "ExchangeLibrary",
    "Linear",
    "Loss",
    "ModelSpec",
    "Module",
    "Norm",
    "Operation",
    "OverlappedCollectives",
    "Parameter",
    "Residual",
    "ScoreBias",
    "Tower",
    "join_names",
]


@dataclass(frozen=True)
class Block:
    """One transformer block: its modules in the order in which they run forward."""

    kind: str
    modules: tuple[Module, ...]
    registration: tuple[str, ...] | None = None
    """Names of the modules in the order of `named_parameters()` if they run in another order (Llama registers
    `input_layernorm` after the MLP), else None.
    """
    input_extent: Extent | None = None
    """The block's input, where that is not the residual stream."""
    is_wrapped: bool = True
    """Whether frameworks that wrap blocks wrap it. Modules that run between two blocks are a block that they
    leave to the root.
    """

    @cached_property
    def numel(self) -> int:
        return sum(module.numel for module in self.modules)

    @cached_property
    def trainable_numel(self) -> int:
        return sum(module.trainable_numel for module in self.modules)

    @cached_property
    def registered_modules(self) -> tuple[Module, ...]:
        """The modules that own parameters, in the order of `named_parameters()`."""
        owners = tuple(module for module in self.modules if module.parameters)
        if self.registration is None:
            return owners
        modules_by_name = {module.name: module for module in owners}
        return tuple(modules_by_name[name] for name in self.registration)


@dataclass(frozen=True)
class Tower:
    """A tower, whose modules see rows of images or of sounds (`Module.sample_rows`), and the projector to
    the language model's width.
    """

    before: tuple[Module, ...]
    """The modules that make patches' features, by their full names."""
    blocks: tuple[Block, ...]
    after: tuple[Module, ...]
    """Mergers and projectors, by their full names, and what puts their output among the tokens."""
    block_prefix: str
    """The prefix of a block's number, of the first list where there are several."""
    hidden_size: int
    rule: ImageRule | SoundRule
    is_attended: bool = False
    """Blocks of the language model attend to its rows, which are no tokens of sequences."""
    num_deep_features: int = 0
    """Layers whose features the language model's first layers add to the stream, one each."""
    block_names: tuple[str, ...] = ()
    """Full names of the blocks, where they are not numbered in one list."""

    def block_name(self, number: int) -> str:
        """The full name of a block."""
        return self.block_names[number] if self.block_names else f"{self.block_prefix}.{number}"

    @property
    def block_lists(self) -> tuple[str, ...]:
        """Names of the module lists that hold the blocks."""
        names = (name.rpartition(".")[0] for name in self.block_names)
        return tuple(dict.fromkeys(names)) or (self.block_prefix,)

    @property
    def sees_sounds(self) -> bool:
        return isinstance(self.rule, SoundRule)

    @property
    def image_rule(self) -> ImageRule:
        """The rule of a tower of images."""
        assert isinstance(self.rule, ImageRule)
        return self.rule

    @cached_property
    def modules(self) -> tuple[Module, ...]:
        """All modules, in the order in which they run."""
        in_blocks = (module for block in self.blocks for module in block.modules)
        return (*self.before, *in_blocks, *self.after)

    @cached_property
    def numel(self) -> int:
        return sum(module.numel for module in self.modules)

    def map_modules(self, change: Callable[[str, Module], Module]) -> Tower:
        """The tower with `change` of each module and its full name. Blocks whose changed modules are equal
        share one object.
        """
        changed: dict[Block, Block] = {}
        blocks = []
        for number, block in enumerate(self.blocks):
            prefix = self.block_name(number)
            modules = (change(f"{prefix}.{module.name}", module) for module in block.modules)
            new_block = replace(block, modules=tuple(modules))
            blocks.append(changed.setdefault(new_block, new_block))
        before, after = (
            tuple(change(module.name, module) for module in modules) for modules in (self.before, self.after)
        )
        return replace(self, before=before, blocks=tuple(blocks), after=after)


@dataclass(frozen=True)
class ModelSpec:
    """A whole model."""

    name: str
    family: str
    hidden_size: int
    vocab_size: int
    max_positions: int | None
    before: tuple[Module, ...]
    """The modules that run once before the blocks (embeddings)."""
    blocks: tuple[Block, ...]
    after: tuple[Module, ...]
    """The modules that run once after the blocks (final norm, LM head, loss). A tied head is a `Linear`
    module without parameters.
    """
    block_prefix: str
    """The prefix of the block's number (`model.layers` in `model.layers.0.self_attn.q_proj.weight`)."""
    is_tied: bool
    source: str
    registered_before_blocks: tuple[str, ...] | None = None
    """Names of the modules that `named_parameters()` lists before the blocks, in order, if they are not just
    `before` (OPT registers its final norm there), else None.
    """
    first_block: int = 0
    """The number of a pipeline stage's first block."""
    token_shards: int = 1
    """The number of parts that the tokens of the residual stream are cut into, of which a rank has one."""
    registered_after_blocks: tuple[str, ...] | None = None
    """Names of the modules that `named_parameters()` lists after the blocks, if not in the order in which
    they run.
    """
    mtp_parameters: int = 0
    """Parameters of a module for multi-token prediction that the published checkpoint has besides, without
    the embedding and head that it shares.
    """
    prediction_blocks: tuple[Block, ...] = ()
    """The blocks that a module for multi-token prediction has. Empty for one like the last block."""
    num_prediction_layers: int = 0
    """Layers of multi-token prediction that are among the blocks."""
    has_encoder: bool = False
    """The first blocks are those of an encoder, and the decoder sees as many tokens. Or the encoder is a
    tower.
    """
    block_names: tuple[str, ...] = ()
    """Full names of the blocks, where they are not numbered in one list. Empty for a block that is not
    wrapped.
    """
    registration: tuple[str, ...] | None = None
    """Full names of all parameters in order, where the order is not that of modules before, blocks, modules
    after.
    """
    captured: CaptureInfo | None = None
    """Facts of a model that was captured from a torch module."""
    towers: tuple[Tower, ...] = ()
    """Towers of sounds and of images, in the order in which they run between the modules before the blocks
    and the blocks.
    """
    text_family: str = ""
    """The family of the language model, if it is another than that of the whole with its towers."""

    @property
    def language_family(self) -> str:
        """The `model_type` of the language model."""
        return self.text_family or self.family

    @property
    def vision_tower(self) -> Tower | None:
        """The tower of images."""
        return next((tower for tower in self.towers if not tower.sees_sounds), None)

    @property
    def audio_tower(self) -> Tower | None:
        """The tower of sounds."""
        return next((tower for tower in self.towers if tower.sees_sounds), None)

    @property
    def function(self) -> str:
        """The user's own function that makes the module, `package.module:function`. Empty without one."""
        return self.captured.function if self.captured else ""

    def block_name(self, number: int) -> str:
        """The full name of a block, by its number in the whole model."""
        return self.block_names[number] if self.block_names else f"{self.block_prefix}.{number}"

    @property
    def unique_blocks(self) -> tuple[Block, ...]:
        """One block of each shape, in order."""
        return tuple({id(block): block for block in self.blocks}.values())

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads of the first attention, or 1 without one."""
        modules = (module for block in self.unique_blocks for module in block.modules)
        return next((attention.num_kv_heads for attention in operations_of(modules, Attention)), 1)

    def map_blocks(self, change: Callable[[Block], Block]) -> ModelSpec:
        """The model with `change` of its blocks, which is made once per shape."""
        changed = {id(block): change(block) for block in self.unique_blocks}
        return replace(self, blocks=tuple(changed[id(block)] for block in self.blocks))

    @property
    def block_lists(self) -> tuple[str, ...]:
        """Names of the module lists that hold the blocks."""
        if not self.block_names:
            in_towers = (name for tower in self.towers for name in tower.block_lists)
            return (self.block_prefix, *in_towers)
        return tuple(dict.fromkeys(name.rpartition(".")[0] for name in self.block_names if name))

    @property
    def learned_positions(self) -> int | None:
        """The maximum sequence length if positions are a table of weights, else None."""
        tables = sum(module.role is Role.EMBEDDING for module in self.before)
        return self.max_positions if tables > 1 else None

    @cached_property
    def numel(self) -> int:
        """Parameters in all, tied weights counted once."""
        in_towers = sum(block.numel for tower in self.towers for block in tower.blocks)
        return self.numel_outside_blocks + in_towers + sum(block.numel for block in self.blocks)

    @cached_property
    def trainable_numel(self) -> int:
        """Parameters with a gradient and optimizer states."""
        tower_modules = (module for tower in self.towers for module in tower.modules)
        outer_modules = (*self.before, *tower_modules, *self.after)
        outer_numel = sum(module.trainable_numel for module in outer_modules)
        return outer_numel + sum(block.trainable_numel for block in self.blocks)

    @cached_property
    def numel_outside_blocks(self) -> int:
        """Parameters outside the blocks."""
        around_towers = (module for tower in self.towers for module in (*tower.before, *tower.after))
        return sum(module.numel for module in (*self.before, *around_towers, *self.after))

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """(full name, parameter) in the order of torch's `named_parameters()`, tied weights once."""
        return iter(self._named_parameters)

    @cached_property
    def _named_parameters(self) -> Sequence[tuple[str, Parameter]]:
        if self.registration is None:
            return tuple(self._iterate_parameters())
        by_name = dict(self._iterate_parameters())
        return tuple((name, by_name[name]) for name in self.registration)

    @cached_property
    def expert_names(self) -> frozenset[str]:
        """Full names of the parameters of routed experts."""
        return frozenset(
            name
            for number, block in enumerate(self.blocks, self.first_block)
            for module in block.registered_modules
            if module.role in (Role.EXPERTS, Role.EXPERT_PRODUCT)
            for name, _ in _named_parameters_of(self.block_name(number), module)
        )

    def _iterate_parameters(self) -> Iterator[tuple[str, Parameter]]:
        for tower in self.towers:
            yield from _tower_parameters(tower)
        early = list(self.before)
        if self.registered_before_blocks is not None:
            by_name = {module.name: module for module in (*self.before, *self.after)}
            early = [by_name[name] for name in self.registered_before_blocks if name in by_name]
        for module in early:
            yield from _named_parameters_of("", module)
        for index, block in enumerate(self.blocks, self.first_block):
            for module in block.registered_modules:
                yield from _named_parameters_of(self.block_name(index), module)
        listed = {module.name for module in early}
        late = [*self.before, *self.after]
        if self.registered_after_blocks is not None:
            late.sort(key=lambda module: _registration_index(module.name, self.registered_after_blocks or ()))
        for module in late:
            if module.name not in listed:
                yield from _named_parameters_of("", module)


def _tower_parameters(tower: Tower) -> Iterator[tuple[str, Parameter]]:
    for module in tower.before:
        yield from _named_parameters_of("", module)
    for number, block in enumerate(tower.blocks):
        for module in block.registered_modules:
            yield from _named_parameters_of(tower.block_name(number), module)
    for module in tower.after:
        yield from _named_parameters_of("", module)


def _registration_index(name: str, order: tuple[str, ...]) -> int:
    return order.index(name) if name in order else len(order)


def _named_parameters_of(prefix: str, module: Module) -> Iterator[tuple[str, Parameter]]:
    for parameter in module.parameters:
        yield join_names(prefix, module.path_of(parameter)), parameter
