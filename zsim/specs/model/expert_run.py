"""The position of a layer of routed experts in its block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zsim.specs.model.experts import Experts, Router, SharedOutput
from zsim.specs.model.spec import Activation, Block, Exchange, Linear, ModelSpec, Module, Norm, Residual


def has_experts(model: ModelSpec) -> bool:
    """Whether any layer routes tokens to experts."""
    return any(isinstance(one.work, Router) for block in model.distinct_blocks for one in block.modules)


def experts_of(model: ModelSpec) -> Experts | None:
    """The stacked experts of the model's first layer that has any.

    None also where experts are modules of their own (`zsim.specs.model.expert_loop`).
    """
    works = (module.work for block in model.distinct_blocks for module in block.modules)
    return next((work for work in works if isinstance(work, Experts)), None)


def mlp_run(modules: Sequence[Module]) -> tuple[int, range]:
    """The index of a block's last norm, and those of the modules from there to the residual.

    The range is empty in a block whose norm follows the MLP.
    """
    last = max((n for n, one in enumerate(modules) if isinstance(one.work, Norm)), default=-1)
    end = next((n for n in range(last + 1, len(modules)) if isinstance(modules[n].work, Residual)), last + 1)
    return last, range(last + 1, end)


def expert_run(block: Block) -> range:
    """The indices of the modules of a layer of experts, router and shared experts included.

    These are the modules between the preceding norm and the following residual or norm. The range is empty in
    a dense block.
    """
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


def shared_output(run: Sequence[Module]) -> SharedOutput:
    """The way in which the output of shared experts is added to that of routed ones, by a layer's modules."""
    products = [one.work for one in run if isinstance(one.work, Linear)]
    if not products:
        return "none"
    return "gated" if any(work.out_features == 1 for work in products) else "added"


def keeping_input_once(modules: Sequence[Module], experts: str) -> list[Module]:
    """The modules of a layer, of which the first that reads the layer's input keeps it.

    The readers are the router, the gate of shared experts, and the products before their activation.
    `experts` is the prefix of the names of routed experts.
    """
    found: list[Module] = []
    is_kept = False
    for number, module in enumerate(modules):
        is_product = isinstance(module.work, Linear) and not module.name.startswith(experts)
        is_apart = ".lora_" in module.name or bool(module.side)  # kept by rules of their own
        is_product = is_product and not is_apart
        is_product = is_product and not _follows_activation(modules, number)
        if isinstance(module.work, Router) or is_product:
            module = replace(module, shares_input=is_kept)
            is_kept = True
        found.append(module)
    return found


def _follows_activation(modules: Sequence[Module], number: int) -> bool:
    before = [one for one in modules[:number] if not isinstance(one.work, Exchange)]
    return bool(before) and isinstance(before[-1].work, Activation)
