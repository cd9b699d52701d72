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

from zsim.operations.operation import Role
from zsim.operations.rearrange import Rearrange
from zsim.specs.model.spec import Block, Exchange, Linear, Module

# Among one rank: no collective, but a function of autograd, at which the streams wait for each other.
_STREAM_SYNC = Exchange(None, None, 0, 1)


def overlap_shared_experts(
    shared: Sequence[Module], router: Module, routed: Sequence[Module], name: str
) -> list[Module]:
    """The modules of a layer in the order in which forward launches them: its `shared` experts, its router,
    and the modules that stand for the routed experts, whose names begin with `name`.
    """
    core = next(n for n, module in enumerate(shared) if module.role is Role.ACTIVATION)
    gates = [
        replace(module, shares_input=True)  # which the router keeps
        for module in shared
        if module.op_spec.is_gate
    ]
    inner, outer = (
        [module for module in modules if not module.op_spec.is_gate]
        for modules in (shared[:core], shared[core + 1 :])
    )
    input_modules = [*gates, *_input_gathers(inner)]
    if not input_modules:
        input_modules = [Module(f"{name} shared input", _STREAM_SYNC)]
    is_gathered = (
        isinstance(input_modules[-1].op_spec, Exchange) and input_modules[-1].op_spec.forward == "all_gather"
    )
    products = [
        _drop_collectives(module, shares=not is_gathered) for module in inner if module.role is Role.PRODUCT
    ]
    output_modules = [
        module if module.role is Role.PRODUCT else replace(module, is_first_in_backward=True)
        for module in outer
    ]
    if not outer or outer[-1].role is not Role.EXCHANGE:
        output_modules.append(Module(f"{name} shared output", _STREAM_SYNC, is_first_in_backward=True))
    input_modules[-1] = replace(
        input_modules[-1], is_first_in_backward=input_modules[-1].role is Role.EXCHANGE
    )
    rows = [
        replace(module, is_first_in_backward=True)
        if module.name.endswith(("all_to_all rows", "all_to_all rows back"))
        else module
        for module in routed
    ]
    *dispatched, last = rows
    assert isinstance(last.op_spec, Rearrange)
    sums = replace(last.op_spec, kind="add", rows=0.0)
    addition = replace(last, name=f"{name}.add", op_spec=sums, rows_per_token=1.0, side_stream="joins")
    start = _first_after_dispatch(dispatched)
    return [
        router,
        *_mark_side_stream(input_modules, first="begins"),
        *dispatched[:start],
        *_mark_side_stream([*products, shared[core]]),
        *dispatched[start:],
        *_mark_side_stream(output_modules, last="ends"),
        replace(last, op_spec=replace(last.op_spec, shared="none")),
        addition,
    ]


def mark_fork(block: Block, index: int) -> Block:
    """The block whose module `index` makes the input of shared experts, which run on a stream of
    their own.
    """
    modules = list(block.modules)
    modules[index] = replace(modules[index], side_stream="forks")
    return replace(block, modules=tuple(modules))


def _mark_side_stream(modules: Sequence[Module], *, first: str = "", last: str = "") -> list[Module]:
    marked = [replace(module, side_stream="continues") for module in modules]
    if first == "begins":
        marked[0] = replace(marked[0], side_stream="begins")
    if last == "ends":
        marked[-1] = replace(marked[-1], side_stream="ends")
    return marked


def _input_gathers(inner: Sequence[Module]) -> list[Module]:
    """The exchange that gathers the input of tensor-parallel ranks, once, and sums up its gradient."""
    for module in inner:
        product = module.op_spec
        beneath = product.overlapped_collectives if isinstance(product, Linear) else None
        if isinstance(product, Linear) and beneath is not None:
            ranks, width = max(product.input_cast_ranks, beneath.input_shards), product.in_features
            is_split = beneath.reduces == "reduce_scatter"
            work = Exchange("all_gather" if is_split else None, beneath.reduces, width, ranks)
            exchange = next((candidate for candidate in inner if candidate.role is Role.EXCHANGE), None)
            if exchange is not None:
                assert isinstance(exchange.op_spec, Exchange)
                return [replace(exchange, op_spec=replace(exchange.op_spec, backward=beneath.reduces))]
            return [Module(f"{module.name} {beneath.reduces}", work)]
    return [module for module in inner if module.role is Role.EXCHANGE]


def _drop_collectives(module: Module, *, shares: bool) -> Module:
    """A product without collectives of its own. With `shares` its input is kept already."""
    assert isinstance(module.op_spec, Linear)
    return replace(module, op_spec=replace(module.op_spec, overlapped_collectives=None), shares_input=shares)


def _first_after_dispatch(routed: Sequence[Module]) -> int:
    """The index after the exchange of rows and scores, or before the first product where there is none."""
    exchanges = [
        n for n, module in enumerate(routed) if module.name.endswith(("all_to_all rows", "all_to_all scores"))
    ]
    if exchanges:
        return exchanges[-1] + 1
    return next(n for n, module in enumerate(routed) if module.role is Role.EXPERT_PRODUCT)
