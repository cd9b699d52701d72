"""The place of a layer of routed experts in its block."""

from __future__ import annotations

from collections.abc import Sequence

from zsim.specs.model.experts import Experts, Router
from zsim.specs.model.spec import Block, ModelSpec, Module, Norm, Residual


def has_experts(model: ModelSpec) -> bool:
    """Whether any layer routes tokens to experts."""
    return experts_of(model) is not None


def experts_of(model: ModelSpec) -> Experts | None:
    """The experts of the model's first layer that has any."""
    works = (module.work for block in model.distinct_blocks for module in block.modules)
    return next((work for work in works if isinstance(work, Experts)), None)


def mlp_run(modules: Sequence[Module]) -> tuple[int, range]:
    """The number of a block's last norm, and those of the modules from there to the residual; of a block with
    its norm behind the MLP none."""
    last = max((n for n, one in enumerate(modules) if isinstance(one.work, Norm)), default=-1)
    end = next((n for n in range(last + 1, len(modules)) if isinstance(modules[n].work, Residual)), last + 1)
    return last, range(last + 1, end)


def expert_run(block: Block) -> range:
    """The numbers of the modules of a layer of experts, router and shared experts included: those between the
    norm before and the residual or norm behind; none in a dense block."""
    modules = block.modules
    place = next((n for n, one in enumerate(modules) if isinstance(one.work, Experts)), None)
    if place is None:
        return range(0)
    first = max(n for n in range(place) if isinstance(modules[n].work, Norm | Residual)) + 1
    end = next(n for n in range(place, len(modules)) if isinstance(modules[n].work, Norm | Residual))
    return range(first, end)


def shared_modules(block: Block) -> list[Module]:
    """The modules of a layer of experts that see every token: its shared experts and their gate."""
    run = [block.modules[n] for n in expert_run(block)]
    return [one for one in run if not isinstance(one.work, Router | Experts)]
