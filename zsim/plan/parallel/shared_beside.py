"""Shared experts beside the exchanges of routed ones: Megatron's `--moe-shared-expert-overlap`.

# [Note: shared experts on a stream of their own]
Megatron-Core 0.16.1 core/transformer/moe/shared_experts.py, token_dispatcher.py (all-to-all alone). Forward:
the stream waits for the layer's input, then has the gate and the gather among tensor-parallel ranks, launched
before the rows are permuted. The first product and the activation follow the launch of the exchange, and the
second product and the scatter that of the exchange back. The compute stream waits for it before the sum,
which is in place. The products have no collectives of their own then: their full input is gathered, and kept.
Backward: autograd runs every function on the stream of its forward, and of those that can run the one that
was made last, but gather, scatter and both exchanges of rows first (`set_tensor_grad_fn_sequence_sr`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zsim.specs.model.experts import GroupedLinear, Rearrange
from zsim.specs.model.spec import Activation, Block, Exchange, Linear, Module

# Among one rank: no collective, but a function of autograd, at which the streams wait for each other.
_NOTHING = Exchange(None, None, 0, 1)


def beside_exchanges(
    shared: Sequence[Module], router: Module, routed: Sequence[Module], name: str
) -> list[Module]:
    """The modules of a layer in the order in which forward launches them: its `shared` experts, its router,
    and the modules that stand for the routed experts, whose names begin with `name`.
    """
    core = next(n for n, one in enumerate(shared) if isinstance(one.work, Activation))
    gates = [
        replace(one, shares_input=True)  # which the router keeps
        for one in shared
        if _is_gate(one)
    ]
    inner, outer = (
        [one for one in part if not _is_gate(one)] for part in (shared[:core], shared[core + 1 :])
    )
    ahead = [*gates, *_gathers(inner)]
    if not ahead:
        ahead = [Module(f"{name} shared input", _NOTHING)]
    is_whole = isinstance(ahead[-1].work, Exchange) and ahead[-1].work.forward == "all_gather"
    first = [_alone(one, shares=not is_whole) for one in inner if isinstance(one.work, Linear)]
    behind = [one if isinstance(one.work, Linear) else replace(one, goes_first=True) for one in outer]
    if not outer or not isinstance(outer[-1].work, Exchange):
        behind.append(Module(f"{name} shared output", _NOTHING, goes_first=True))
    ahead[-1] = replace(ahead[-1], goes_first=isinstance(ahead[-1].work, Exchange))
    rows = [
        replace(one, goes_first=True)
        if one.name.endswith(("all_to_all rows", "all_to_all rows back"))
        else one
        for one in routed
    ]
    *dispatched, last = rows
    assert isinstance(last.work, Rearrange)
    sums = replace(last.work, kind="add", rows=0.0)
    added = replace(last, name=f"{name}.add", work=sums, rows_per_token=1.0, side="joins")
    start = _first_after_dispatch(dispatched)
    return [
        router,
        *_marked(ahead, first="begins"),
        *dispatched[:start],
        *_marked([*first, shared[core]]),
        *dispatched[start:],
        *_marked(behind, last="ends"),
        replace(last, work=replace(last.work, shared="none")),
        added,
    ]


def with_fork(block: Block, place: int) -> Block:
    """The block whose module `index` makes the input of shared experts, which run on a stream of
    their own.
    """
    modules = list(block.modules)
    modules[place] = replace(modules[place], side="forks")
    return replace(block, modules=tuple(modules))


def _marked(modules: Sequence[Module], *, first: str = "", last: str = "") -> list[Module]:
    found = [replace(one, side="continues") for one in modules]
    if first == "begins":
        found[0] = replace(found[0], side="begins")
    if last == "ends":
        found[-1] = replace(found[-1], side="ends")
    return found


def _gathers(inner: Sequence[Module]) -> list[Module]:
    """The exchange that gathers the input of tensor-parallel ranks, once, and sums up its gradient."""
    for one in inner:
        beneath = one.work.beneath if isinstance(one.work, Linear) else None
        if isinstance(one.work, Linear) and beneath is not None:
            ranks, width = one.work.input_parts, one.work.in_features
            ranks = max(ranks, beneath.input_shards)
            is_split = beneath.reduces == "reduce_scatter"
            work = Exchange("all_gather" if is_split else None, beneath.reduces, width, ranks)
            whole = next((each for each in inner if isinstance(each.work, Exchange)), None)
            if whole is not None:
                assert isinstance(whole.work, Exchange)
                return [replace(whole, work=replace(whole.work, backward=beneath.reduces))]
            return [Module(f"{one.name} {beneath.reduces}", work)]
    return [one for one in inner if isinstance(one.work, Exchange)]


def _is_gate(module: Module) -> bool:
    return isinstance(module.work, Linear) and module.work.out_features == 1


def _alone(module: Module, *, shares: bool) -> Module:
    """A product without collectives of its own. With `shares` its input is kept already."""
    assert isinstance(module.work, Linear)
    return replace(module, work=replace(module.work, beneath=None), shares_input=shares)


def _first_after_dispatch(routed: Sequence[Module]) -> int:
    """The index after the exchange of rows and scores, or before the first product where there is none."""
    sent = [n for n, one in enumerate(routed) if one.name.endswith(("all_to_all rows", "all_to_all scores"))]
    if sent:
        return sent[-1] + 1
    return next(n for n, one in enumerate(routed) if isinstance(one.work, GroupedLinear))
