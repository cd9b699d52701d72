"""Records the operators that torch dispatches while a module runs on the meta device, below autograd.

# [Note: whose backward]
Autograd numbers its nodes as forward makes them, just before the operator is dispatched
(`torch.autograd._get_sequence_nr`, as torch 2.13's AOTAutograd pairs forward and backward). Operators that
run while a node runs backward belong to the site at which forward made the node. Gradients of one tensor that
several nodes give are added after a node has run, and belong to its site.

# [Note: counted once]
A storage that several sites keep for backward counts at the first that did not make it. A storage that only
its maker keeps (the output of a relu) counts there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from zsim.errors import InputError
from zsim.specs.capture.products import ALLOCATIONS, MEMORY_BOUND, products_of
from zsim.specs.capture.recording import CallSite, ModuleRecording, ModuleRun, Operator, Product, Storage, Use

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_ACCUMULATES = "AccumulateGrad"


class Recorder:
    """Fills a recording while torch runs. `low` is the type that the module computes in."""

    def __init__(self, recording: ModuleRecording, low: torch.dtype) -> None:
        self.recording, self.low = recording, low
        self.is_backward = self.is_paused = False
        self._numbers: dict[int, int] = {}  # of a storage that lives, by its identity in torch
        self._site: int | None = None
        self._stack: list[int] = []
        self._site_of_node: dict[int, int] = {}
        self._last, self._finished = 0, -1
        self._operators = 0
        self._names: dict[int, str] = {}  # of the operator that made a storage

    # ---- storages ------------------------------------------------------------------------------------------

    def register(self, tensor: Tensor, **facts: Any) -> int:
        """The number of a tensor's storage. A new storage is added to the recording with `facts`."""
        storage = tensor.untyped_storage()
        key: int = storage._cdata
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.recording.storages)
            low = tensor.dtype == self.low
            new_storage = Storage(
                storage.nbytes(), tensor.element_size(), low, facts.pop("grows", False), **facts
            )
            self.recording.storages.append(new_storage)
            weakref.finalize(storage, self._mark_freed, key, number).atexit = False
        return number

    def _mark_freed(self, key: int, number: int) -> None:
        if self._numbers.get(key) == number:
            del self._numbers[key]
        self.recording.storages[number].died = self._operators

    def _grows(self, tensor: Any) -> bool:
        return self.recording.storages[self.register(tensor)].grows

    def _use(self, tensor: Tensor) -> Use:
        numel = 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            numel *= size if stride else 1
        return Use(self.register(tensor), numel, tensor.element_size())

    # ---- modules -------------------------------------------------------------------------------------------

    def enter(self, path: str, inputs: Iterable[Tensor]) -> None:
        """Record that a module's forward begins.

        Raises InputError in backward, where only a checkpoint calls modules.
        """
        if self.is_backward:
            raise InputError(
                f"module '{path}' runs again in backward: it checkpoints its activations itself; expected a "
                "module that does not (transformers: gradient_checkpointing_disable()), and "
                "training.activation_checkpointing instead"
            )
        input_storages = {self.register(tensor): tensor for tensor in inputs}
        size = sum(
            self.recording.storages[number].num_bytes
            for number in input_storages
            if self._is_activation(number)
        )
        parent = self._stack[-1] if self._stack else -1
        self._stack.append(len(self.recording.calls))
        self.recording.calls.append(ModuleRun(path, parent, size))
        self._site = None

    def _is_activation(self, number: int) -> bool:
        storage = self.recording.storages[number]
        return storage.grows and not storage.parameter and storage.is_low

    def leave(self) -> None:
        """Record that the innermost module's forward has ended."""
        self._stack.pop()
        self._site = None

    def innermost(self) -> str:
        """The path of the module that runs."""
        return self.recording.calls[self._stack[-1]].path if self._stack else ""

    def start_site(self) -> None:
        """Begin a new site for the operators that follow."""
        self._site = None

    def _forward_site(self) -> int:
        if self._site is None:
            call = self._stack[-1] if self._stack else 0
            self._site = len(self.recording.sites)
            self.recording.sites.append(CallSite(self.recording.calls[call].path, call))
        return self._site

    def answer_condition(self, func: Any, args: Sequence[Any]) -> bool | None:
        """The answer where the host reads a condition on all elements of a tensor, which has no values.

        Such a condition counts as true, as it is for full and unpacked samples (a mask without padding). The
        answer is None for anything else.
        """
        if func._overloadpacket.__name__ != "_local_scalar_dense":
            return None
        operator_name = self._names.get(self.register(args[0]))
        if operator_name in ("all", "_is_all_true", "any"):
            self.recording.assumes_full = True
            return operator_name != "any"
        return None

    # ---- operators -----------------------------------------------------------------------------------------

    def record_operator(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        """Record an operator that has run."""
        if self.is_paused:
            return
        name = func._overloadpacket.__name__
        site, is_sum = self._locate()
        if site is None:
            return
        inputs, outputs = list(_tensors((args, kwargs))), list(_tensors(out))
        input_storages = {self.register(tensor) for tensor in inputs}
        grows = any(self.recording.storages[number].grows for number in input_storages)
        mutated_arguments = _mutated_arguments(func, args, kwargs)
        new_outputs = [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in self._numbers]
        new_storages = {
            self.register(tensor, grows=grows, born=self._operators, creator=site): tensor
            for tensor in new_outputs
        }
        self._names.update(dict.fromkeys(new_storages, name))
        if grows:
            for tensor in mutated_arguments:
                self.recording.storages[self.register(tensor)].grows = True
        if name in ALLOCATIONS or (not new_storages and not mutated_arguments):
            return
        products = products_of(name, args, out, self._grows)
        self._append_operator(
            name,
            site,
            inputs,
            [*new_storages.values(), *mutated_arguments],
            products,
            _is_memory_bound(func, name),
            is_sum,
        )

    def _append_operator(
        self, name: str, site: int, inputs: Iterable[Tensor], outputs: Iterable[Tensor],
        products: tuple[Product, ...], is_priced: bool, is_sum: bool = False,
    ) -> None:  # fmt: skip
        reads = {use.storage: use for use in map(self._use, inputs)}
        writes = {use.storage: use for use in map(self._use, outputs)}
        operator = Operator(
            name, site, tuple(reads.values()), tuple(writes.values()), products,
            is_priced or bool(products), is_sum,
        )  # fmt: skip
        (self.recording.backward if self.is_backward else self.recording.forward).append(operator)
        self._operators += 1

    def _locate(self) -> tuple[int | None, bool]:
        """(site of the operator that is dispatched now, whether autograd adds gradients).

        The site is None for operators that are not part of the module. See [Note: whose backward].
        """
        import torch

        if not self.is_backward:
            site = self._forward_site()
            self._site_of_node.setdefault(torch.autograd._get_sequence_nr() - 1, site)  # type: ignore[attr-defined]
            return site, False
        node = torch._C._current_autograd_node()
        if node is None or _ACCUMULATES in node.name():
            return None, False
        number = node._sequence_nr()
        self._last = self._site_of_node.get(number, self._last)
        return self._last, number == self._finished

    def begin_backward(self, roots: Iterable[Tensor]) -> None:
        """Backward begins at `roots`. Every node then records that it has run."""
        pending_nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
        seen = set(pending_nodes)
        while pending_nodes:
            node = pending_nodes.pop()
            if _ACCUMULATES not in node.name():
                node.register_hook(self._make_finish_hook(node._sequence_nr()))
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    pending_nodes.append(following)
        self.is_backward = True

    def _make_finish_hook(self, number: int) -> Callable[[Any, Any], None]:
        def finished(_: Any, __: Any) -> None:
            self._finished = number

        return finished

    def record_attention(
        self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], product: Product
    ) -> None:
        """Record fused attention, which is no operator of the meta device."""
        site, _ = self._locate()
        assert site is not None
        for output in outputs:
            self.recording.storages[self.register(output)].grows = True
        self._append_operator(name, site, inputs, outputs, (product,), True)

    # ---- what autograd keeps -------------------------------------------------------------------------------

    def record_saved(self, tensor: Tensor) -> Tensor:
        """Record that autograd keeps a tensor for backward."""
        if not self.is_backward:
            self.recording.storages[self.register(tensor)].savers.append(self._forward_site())
        return tensor.detach()

    def mark_gradients(self, tensors: Iterable[Tensor]) -> None:
        """Mark the gradients that backward has left in parameters."""
        for tensor in tensors:
            self.recording.storages[self.register(tensor)].is_gradient = True


def _tensors(tree: Any) -> Iterable[Tensor]:
    import torch
    from torch.utils import _pytree

    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _mutated_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an operator writes to."""
    if not func._schema.is_mutable:
        return []
    tensors: list[Tensor] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            tensors += _tensors(value)
    return tensors


def _is_memory_bound(func: Any, name: str) -> bool:
    """Whether memory bandwidth bounds an operator."""
    import torch

    return torch.Tag.pointwise in func.tags or name in MEMORY_BOUND
