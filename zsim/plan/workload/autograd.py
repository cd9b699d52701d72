"""The order in which autograd comes back to the modules of a segment, some of which ran on another stream."""

from __future__ import annotations

from collections.abc import Sequence

from zsim.specs.model.spec import Exchange, Module

ON_SIDE = ("begins", "continues", "ends")


def backward_order(modules: Sequence[Module]) -> list[int]:
    """Numbers of modules in the order of their backward: the reverse of forward, unless shared experts run
    beside the exchanges.

    Then, of the next modules of both streams, one that is marked to go first comes first, and otherwise the
    one that ran last forward. Of two exchanges in a row both can run. See [Note: shared experts on a stream
    of their own] of `zsim.plan.parallel.shared_beside`.
    """
    joins = next((n for n, one in enumerate(modules) if one.side == "joins"), None)
    if joins is None:
        return list(range(len(modules) - 1, -1, -1))
    forks = next(n for n, one in enumerate(modules) if one.side == "forks")
    inside = range(joins - 1, forks, -1)
    side = [n for n in inside if modules[n].side in ON_SIDE]
    main = [n for n in inside if modules[n].side not in ON_SIDE]
    found = _taken(modules, side, main)
    return [*range(len(modules) - 1, joins - 1, -1), *found, *range(forks, -1, -1)]


def _taken(modules: Sequence[Module], side: list[int], main: list[int]) -> list[int]:
    """The modules of two streams, last first, in the order in which autograd takes them."""
    found: list[int] = []
    while side or main:
        ready = [*side[:1], *main[:1]]
        if len(main) > 1 and all(isinstance(modules[n].work, Exchange) for n in main[:2]):
            ready.append(main[1])
        chosen = max(ready, key=lambda n: (modules[n].goes_first, n))
        (side if chosen in side else main).remove(chosen)
        found.append(chosen)
    return found
