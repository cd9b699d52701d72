"""The order in which autograd comes back to the modules of a segment, some of which ran on another stream."""

from __future__ import annotations

from collections.abc import Sequence

from zsim.operations.operation import Role
from zsim.specs.model.spec import Module

SIDE_STREAM_MARKS = ("begins", "continues", "ends")


def backward_order(modules: Sequence[Module]) -> list[int]:
    """Numbers of modules in the order of their backward: the reverse of forward, unless shared experts run
    beside the exchanges.

    Then, of the next modules of both streams, one that is marked to go first comes first, and otherwise the
    one that ran last forward. Of two exchanges in a row both can run. See [Note: shared experts on a stream
    of their own] of `zsim.plan.parallel.shared_expert_overlap`.
    """
    joins = next((n for n, module in enumerate(modules) if module.side_stream == "joins"), None)
    if joins is None:
        return list(range(len(modules) - 1, -1, -1))
    forks = next(n for n, module in enumerate(modules) if module.side_stream == "forks")
    overlapped_modules = range(joins - 1, forks, -1)
    side_modules = [n for n in overlapped_modules if modules[n].side_stream in SIDE_STREAM_MARKS]
    main_modules = [n for n in overlapped_modules if modules[n].side_stream not in SIDE_STREAM_MARKS]
    interleaved = _interleave(modules, side_modules, main_modules)
    return [*range(len(modules) - 1, joins - 1, -1), *interleaved, *range(forks, -1, -1)]


def _interleave(modules: Sequence[Module], side_modules: list[int], main_modules: list[int]) -> list[int]:
    """The modules of two streams, last first, in the order in which autograd takes them."""
    order: list[int] = []
    while side_modules or main_modules:
        ready = [*side_modules[:1], *main_modules[:1]]
        if len(main_modules) > 1 and all(modules[n].role is Role.EXCHANGE for n in main_modules[:2]):
            ready.append(main_modules[1])
        chosen = max(ready, key=lambda n: (modules[n].is_first_in_backward, n))
        (side_modules if chosen in side_modules else main_modules).remove(chosen)
        order.append(chosen)
    return order
