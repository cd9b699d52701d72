"""The position of a layer of routed experts in its block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zsim.operations.experts import Experts
from zsim.operations.operation import Role, operations_of
from zsim.operations.rearrange import SharedOutput
from zsim.specs.model.spec import Block, ModelSpec, Module


def has_experts(model: ModelSpec) -> bool:
    """Whether any layer routes tokens to experts."""
    return any(module.role is Role.ROUTER for block in model.unique_blocks for module in block.modules)


def stacked_experts(model: ModelSpec) -> Experts | None:
    """The stacked experts of the model's first layer that has any.

    None also where experts are modules of their own (`zsim.specs.model.expert_loop`).
    """
    modules = (module for block in model.unique_blocks for module in block.modules)
    return next(iter(operations_of(modules, Experts)), None)


def num_experts(model: ModelSpec) -> int:
    """Routed experts of a layer, 1 without any."""
    modules = (module for block in model.unique_blocks for module in block.modules)
    return max((getattr(module.op_spec, "num_experts", 1) for module in modules), default=1)


def mlp_module_range(modules: Sequence[Module]) -> tuple[int, range]:
    """The index of a block's last norm, and those of the modules from there to the residual.

    The range is empty in a block whose norm follows the MLP, and in one without an MLP.
    """
    last = max((n for n, module in enumerate(modules) if module.role is Role.NORM), default=-1)
    end = next((n for n in range(last + 1, len(modules)) if modules[n].role is Role.RESIDUAL), last + 1)
    if any(module.role is Role.MIXER for module in modules[last + 1 : end]):  # a block with a mixer alone
        return last, range(last + 1, last + 1)
    return last, range(last + 1, end)


def expert_module_range(block: Block) -> range:
    """The indices of the modules of a layer of experts, router and shared experts included.

    These are the modules between the preceding norm and the following residual or norm. The range is empty in
    a dense block.
    """
    modules = block.modules
    experts_index = next((n for n, module in enumerate(modules) if module.role is Role.EXPERTS), None)
    if experts_index is None:
        return range(0)
    first = max(n for n in range(experts_index) if modules[n].role in (Role.NORM, Role.RESIDUAL)) + 1
    end = next(n for n in range(experts_index, len(modules)) if modules[n].role in (Role.NORM, Role.RESIDUAL))
    return range(first, end)


def shared_modules(block: Block) -> list[Module]:
    """The modules of a layer of experts that see every token: its shared experts and their gate."""
    run = [block.modules[n] for n in expert_module_range(block)]
    routed = (Role.ROUTER, Role.EXPERTS)
    return [module for module in run if module.role not in routed and not module.op_spec.is_duplicated]


def shared_output(run: Sequence[Module]) -> SharedOutput:
    """The way in which the output of shared experts is added to that of routed ones, by a layer's modules."""
    operations = [module.op_spec for module in run if module.role is Role.PRODUCT]
    products = [op_spec for op_spec in operations if not op_spec.is_duplicated]
    if not products:
        return "none"
    return "gated" if any(op_spec.is_gate for op_spec in products) else "added"


def share_layer_input(modules: Sequence[Module], experts: str) -> list[Module]:
    """The modules of a layer, of which the first that reads the layer's input keeps it.

    The readers are the router, the gate of shared experts, and the products before their activation.
    `experts` is the prefix of the names of routed experts.
    """
    updated: list[Module] = []
    is_kept = is_routed = False
    for number, module in enumerate(modules):
        is_routed = is_routed or module.role is Role.EXPERT_PRODUCT
        is_product = module.role is Role.PRODUCT and not module.name.startswith(experts)
        is_product = is_product and not (is_routed and module.op_spec.is_duplicated)
        has_separate_rules = ".lora_" in module.name or bool(module.side_stream)  # kept by rules of their own
        is_product = is_product and not has_separate_rules
        is_product = is_product and not _follows_activation(modules, number)
        if module.role is Role.ROUTER or is_product:
            module = replace(module, shares_input=is_kept)
            is_kept = True
        updated.append(module)
    return updated


def _follows_activation(modules: Sequence[Module], number: int) -> bool:
    before = [module for module in modules[:number] if module.role is not Role.EXCHANGE]
    return bool(before) and before[-1].role is Role.ACTIVATION
