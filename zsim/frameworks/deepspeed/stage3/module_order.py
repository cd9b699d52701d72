"""The modules that ZeRO-3 hooks, and the order in which they are entered.

DeepSpeed 0.19.8 (`runtime/zero/parameter_offload.py`, `_register_deepspeed_module`) hooks every module of the
model down to its leaf modules, including containers and modules without parameters. Entering a module counts
as a step of the trace and prefetches, so a module without parameters too is an opportunity to prefetch.
`traces/deepspeed/hooks.json` has the orders of entry of real models.

# [Note: checkpoints and hooks]
Checkpointing is inside a block's forward (transformers 5), so hooks on the block itself are outside of it.
torch's non-reentrant checkpoint recomputes when backward first needs a dropped tensor: inside the last module
that saves a tensor, whose backward hook, and the hooks of its parents, have fired by then. A reentrant
checkpoint recomputes before any hook inside the block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from zsim.operations.operation import Role, operations_of
from zsim.operations.rearrange import Rearrange
from zsim.operations.traced import TracedModule
from zsim.plan.workload.workload import ModuleCall, Segment, Workload
from zsim.specs.model.spec import Activation, Attention

ROOT = ""  # the model itself, entered before anything else in forward and in backward

# Dropout modules by the module they follow, in transformers 5.23; in blocks without the block's name.
_DROPOUTS: dict[str, dict[str, str]] = {
    "gpt2": {
        "transformer.wpe": "transformer.drop",
        "attn.c_proj": "attn.resid_dropout",
        "mlp.c_proj": "mlp.dropout",
    },
    "gpt_neo": {
        "transformer.wpe": "transformer.drop",
        "attn.attention.v_proj": "attn.attention.attn_dropout",
        "attn.attention.out_proj": "attn.attention.resid_dropout",
        "mlp.c_proj": "mlp.dropout",
    },
    "gpt_neox": {
        "gpt_neox.embed_in": "gpt_neox.emb_dropout",
        "attention.dense": "post_attention_dropout",
        "mlp.dense_4h_to_h": "post_mlp_dropout",
    },
    "gptj": {
        "transformer.wte": "transformer.drop",
        "attn.v_proj": "attn.attn_dropout",
        "attn.out_proj": "attn.resid_dropout",
        "mlp.fc_out": "mlp.dropout",
    },
    "bloom": {"self_attention.query_key_value": "self_attention.attention_dropout"},
    "mpt": {"attn.out_proj": "resid_attn_dropout"},
    "phi3": {"self_attn.o_proj": "resid_attn_dropout", "mlp.down_proj": "resid_mlp_dropout"},
}
_UNCALLED = {"opt": {"model"}}  # OPTForCausalLM calls model.decoder
_LIST = "_list."  # of adapters, of which a layer calls one
_PER_BLOCK_ROTARY = {"gptj"}  # rotary positions are computed in each block, not by a module


@dataclass(frozen=True, slots=True)
class HookedModules:
    """The hooked modules and the calls before which they are entered. Modules without parameters are listed
    with the next module that has parameters.
    """

    forward: Mapping[str, tuple[str, ...]]
    """`forward[name]` are the modules entered before the module call `name` in forward, outermost first."""
    backward: Mapping[str, tuple[str, ...]]
    """The same in backward."""
    trailing: Mapping[str, tuple[str, ...]]
    """Modules without parameters at a segment's end."""
    stops_early: bool
    """Whether checkpoints are torch's non-reentrant ones."""

    def modules_before_recompute(self, segment: Segment) -> tuple[str, ...]:
        """Modules entered in backward before a checkpointed block is recomputed. See [Note: checkpoints and
        hooks].
        """
        last = next((call for call in reversed(segment.calls) if call.name in self.backward), None)
        modules = self.backward[last.name] if last else ()
        if not self.stops_early:
            return tuple(name for name in modules if not _is_inside(name, segment.name))
        return modules[:-1] if _recomputes_completely(segment) else modules

    def recomputed_modules(self, call: ModuleCall) -> tuple[str, ...]:
        """Modules entered before a recomputed call."""
        modules = self.forward.get(call.name, ())
        return tuple([name for name in modules if _is_inside(name, call.segment)]) if modules else ()

    def modules_after_recompute(self, segment: Segment) -> tuple[str, ...]:
        """Modules entered after the last recomputed call."""
        return self.trailing.get(segment.name, ()) if _recomputes_completely(segment) else ()

    def order(self, workload: Workload) -> Iterator[str]:
        """All modules entered in one forward and backward, in order."""
        yield ROOT
        for segment in workload.segments:
            for call in segment.calls:
                yield from self.forward.get(call.name, ())
        yield ROOT
        for segment in reversed(workload.segments):
            entered_early: tuple[str, ...] = ()
            if segment.is_checkpointed:
                entered_early = self.modules_before_recompute(segment)
                yield from entered_early
                stop = () if segment.stops_at is None else (segment.stops_at,)
                for call in (*segment.recomputed, *stop):
                    yield from self.recomputed_modules(call)
                yield from self.modules_after_recompute(segment)
            for call in reversed(segment.calls):
                yield from (name for name in self.backward.get(call.name, ()) if name not in entered_early)


def _recomputes_completely(segment: Segment) -> bool:
    """Whether recomputation runs to the block's end: its last call saves a tensor (a dropout's mask)."""
    return bool(segment.recomputed) and segment.recomputed[-1].name == segment.calls[-1].name


def _is_inside(name: str, segment: str) -> bool:
    return name.startswith(segment + ".")


def hooked_modules(workload: Workload, unit_of: Mapping[str, str]) -> HookedModules:
    """The hooked modules. `unit_of` is the unit of each module with parameters (the module or its leaf
    module).
    """
    family = workload.model.family
    unhooked = {*workload.model.block_lists, *_UNCALLED.get(family, ())}
    leaves = {unit for name, unit in unit_of.items() if name != unit}  # leaf modules, with modules in them
    modules_per_segment = {segment.name: _modules(workload, segment) for segment in workload.segments}
    names = [name for modules in modules_per_segment.values() for name in modules]
    unhooked.update(expert_lists(workload))
    unhooked.update(name[: name.index(_LIST) + len(_LIST) - 1] for name in names if _LIST in name)
    chains = _chains(names, unhooked, leaves)
    rotary = _rotary(workload)
    modules_without_backward = {rotary, *calls_without_backward(workload)}
    backward = [name for name in reversed(names) if name not in modules_without_backward]
    trailing = {}
    for segment, modules in modules_per_segment.items():
        last = max((number for number, name in enumerate(modules) if name in unit_of), default=-1)
        trailing[segment] = tuple(name for name in modules[last + 1 :] if chains[name][-1] == name)
    return HookedModules(
        _modules_entered(names, chains, unit_of),
        _modules_entered(backward, chains, unit_of),
        trailing,
        workload.training.checkpoint_stops_early,
    )


def expert_lists(workload: Workload) -> list[str]:
    """The lists that hold experts which are modules of their own, and are called one by one."""
    calls = (call for segment in workload.segments for call in segment.calls)
    lists = (
        call.name.rpartition(".")[0]
        for call in calls
        if isinstance(call.module.op_spec, Rearrange) and call.module.op_spec.kind == "loop"
    )
    return list(dict.fromkeys(lists))


def calls_without_backward(workload: Workload) -> set[str]:
    """Calls that autograd does not come back to: nothing before them, and nothing in them, is trained."""
    calls = (call for segment in workload.segments for call in segment.calls)
    return {call.name for call in calls if call.parameters and not call.module.has_backward}


def _modules(workload: Workload, segment: Segment) -> list[str]:
    """A segment's modules in the order of calls: a gated activation is between its two products."""
    model = workload.model
    dropouts = _DROPOUTS.get(model.family, {})
    names: list[str] = []
    calls: list[ModuleCall] = []
    for call in segment.calls:
        if not _exists(workload, segment, call):
            continue
        work = call.module.op_spec
        is_between = isinstance(work, Activation) and work.gated and _are_two_products(calls)
        names.insert(len(names) - is_between, call.name)
        calls.append(call)
        prefix = f"{segment.name}." if segment.kind == "block" else ""
        if dropout := dropouts.get(call.name.removeprefix(prefix)):
            names.append(prefix + dropout)
    if segment.kind == "before" and (rotary := _rotary(workload)):
        names.append(rotary)
    return names


def _exists(workload: Workload, segment: Segment, call: ModuleCall) -> bool:
    """Whether the call is a module in the framework, and not a function between modules or in one."""
    work = call.module.op_spec
    if work.is_function or call.module.is_idle:
        return False
    if isinstance(work, TracedModule) and call.module.parameter_owner is not None and not call.parameters:
        return False
    if call.name == workload.fused_head:
        return False
    return segment.kind == "block" or call.module.role is not Role.ACTIVATION


def _are_two_products(calls: Sequence[ModuleCall]) -> bool:
    """Whether the last two calls are products of the same input (gate and up)."""
    last = calls[-2:]
    return (
        len(last) == 2
        and all(call.module.role is Role.PRODUCT for call in last)
        and last[1].module.shares_input
    )


def _rotary(workload: Workload) -> str | None:
    """The module in which transformers computes rotary positions once for all blocks, or None."""
    model = workload.model
    modules = [module for block in model.blocks[:1] for module in block.modules]
    if model.family in _PER_BLOCK_ROTARY or not any(
        attention.rotary for attention in operations_of(modules, Attention)
    ):
        return None
    parent = model.block_prefix.rpartition(".")[0]
    return f"{parent}.rotary_emb" if parent else "rotary_emb"


def _chains(names: Iterable[str], unhooked: set[str], leaves: set[str]) -> dict[str, tuple[str, ...]]:
    """The hooked modules from the model down to each module, for `names` and their parents. There are none
    below a leaf module.
    """
    chains: dict[str, tuple[str, ...]] = {ROOT: (ROOT,)}
    leaf_modules = leaves & {ROOT}  # and modules in them
    for name in names:
        parent, new_modules = name, list[str]()
        while parent not in chains:
            new_modules.append(parent)
            parent = parent.rpartition(".")[0]
        for module in reversed(new_modules):
            is_hooked = parent not in leaf_modules and module not in unhooked
            chains[module] = (*chains[parent], module) if is_hooked else chains[parent]
            if parent in leaf_modules or module in leaves:
                leaf_modules.add(module)
            parent = module
    return chains


def _modules_entered(
    names: Iterable[str], chains: Mapping[str, tuple[str, ...]], unit_of: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    entered_modules: dict[str, tuple[str, ...]] = {}
    current_chain: Sequence[str] = (ROOT,)
    pending_modules: list[str] = []
    for name in names:
        pending_modules += [module for module in chains[name] if module not in current_chain]
        current_chain = chains[name]
        if name in unit_of:
            entered_modules[name] = tuple(pending_modules)
            pending_modules = []
    return entered_modules
