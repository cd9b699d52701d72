"""Records the operators that torch dispatches while a module runs on the meta device, below autograd.

# [Note: whose backward]
Autograd numbers its nodes as forward makes them, just before the operator is dispatched
(`torch.autograd._get_sequence_nr`, as torch 2.13's AOTAutograd pairs forward and backward). Operators that
run while a node runs backward belong to the site at which forward made the node. Gradients of one tensor that
several nodes give are added after a node has run, and belong to its site.

# [Note: counted once]
A storage that several sites keep for backward counts at the first that did not make it. A storage that only
its maker keeps (the output of a relu) counts there.

# [Note: FLOPs of products]
Products count 2 m n k, as torch's `FlopCounterMode` does (torch 2.13 utils/flop_counter.py), grouped products
2 k n per row. A convolution is priced as a product, without its own kernel (implicit GEMM): m output
positions, n output channels, k inputs to each.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from zsim.errors import InputError
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
        inputs, outputs = tensors_of((args, kwargs)), tensors_of(out)
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


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in nested sequences and mappings, in order."""
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
            tensors += tensors_of(value)
    return tensors


def _is_memory_bound(func: Any, name: str) -> bool:
    """Whether memory bandwidth bounds an operator."""
    import torch

    return torch.Tag.pointwise in func.tags or name in MEMORY_BOUND


Grows = Callable[[Any], bool]

# Convolutions with fewer inputs to each output channel than this (depthwise ones) are bound by memory.
_MIN_CHANNELS = 4

# Not of torch's tag "pointwise", but each element is read and written once or a few times.
MEMORY_BOUND = frozenset(
    """
    sum mean var var_mean std amax amin max min argmax argmin prod any all _is_all_true norm
    linalg_vector_norm logsumexp _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data
    nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward mse_loss
    mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward
    binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits
    native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward
    _fused_rms_norm _fused_rms_norm_backward native_batch_norm native_batch_norm_backward
    _native_batch_norm_legit cudnn_batch_norm cudnn_batch_norm_backward batch_norm_backward
    _batch_norm_with_update _batch_norm_with_update_functional native_dropout
    native_dropout_backward bernoulli bernoulli_ rand randn rand_like randn_like randint uniform_
    normal_ random_ exponential_ embedding embedding_dense_backward gather index_select
    select_backward slice_backward index take cat stack split_with_sizes_copy _to_copy clone copy
    copy_ contiguous fill fill_ zero_ zeros zeros_like ones ones_like full full_like new_zeros
    new_ones new_full scalar_tensor arange linspace eye tril triu tril_indices constant_pad_nd
    reflection_pad1d reflection_pad2d replication_pad2d roll flip repeat pixel_shuffle
    pixel_unshuffle expand_copy avg_pool2d avg_pool2d_backward max_pool2d_with_indices
    max_pool2d_with_indices_backward avg_pool1d max_pool3d_with_indices _adaptive_avg_pool2d
    _adaptive_avg_pool2d_backward avg_pool3d adaptive_max_pool2d adaptive_max_pool2d_backward
    upsample_nearest1d upsample_nearest2d upsample_nearest2d_backward upsample_nearest1d_backward
    upsample_bilinear2d upsample_bilinear2d_backward upsample_bicubic2d upsample_bicubic2d_backward
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa glu glu_backward glu_jvp bucketize one_hot mv dot
    masked_fill masked_fill_ where where_self cumsum cumsum_ pow fill_diagonal_ gelu_backward
    silu_backward threshold_backward sigmoid_backward tanh_backward hardswish_backward
    hardsigmoid_backward leaky_relu_backward elu_backward softplus_backward mish_backward
    hardtanh_backward _prelu_kernel _prelu_kernel_backward floor_divide remainder fmod lerp addcmul
    addcdiv slice_scatter select_scatter masked_scatter
    """.split()  # noqa: SIM905 - words, not a hundred lines
)

# Operators that only make room, or look at memory in another way.
ALLOCATIONS = frozenset(
    """
    empty empty_like new_empty empty_strided new_empty_strided empty_permuted resize_ set_
    as_strided_
    """.split()  # noqa: SIM905 - words, not a hundred lines
)


def _layout(a: Tensor, b: Tensor) -> str:
    """The order of the operands in memory: "nt" if the second operand is transposed, "tn" if the first is."""
    if _is_transposed(a):
        return "tn"
    return "nt" if _is_transposed(b) else "nn"


def _is_transposed(matrix: Tensor) -> bool:
    return matrix.dim() >= 2 and matrix.stride(-2) == 1 and matrix.stride(-1) != 1


def _scaled_dimension(a: Tensor, b: Tensor, grows: Grows, *, batched: bool = False) -> int | None:
    """Index in (m, n, k) of the dimension that grows with the samples, or None.

    If both operands grow, it is the tokens that are summed over (k), or the batch of a batched product
    (None).
    """
    if grows(a) and grows(b):
        return None if batched else 2
    return 0 if grows(a) else (1 if grows(b) else None)


def _matmul(a: Tensor, b: Tensor, grows: Grows) -> tuple[Product, ...]:
    (m, k), n = a.shape, b.shape[1]
    return (Product("gemm", 2.0 * m * n * k, (m, n, k), _scaled_dimension(a, b, grows), _layout(a, b)),)


def _batched_matmul(a: Tensor, b: Tensor, grows: Grows) -> tuple[Product, ...]:
    (batch, m, k), n = a.shape, b.shape[2]
    scaled = _scaled_dimension(a, b, grows, batched=True)
    return (Product("gemm", 2.0 * batch * m * n * k, (m, n, k), scaled, _layout(a, b)),)


def _grouped_matmul(args: Sequence[Any], grows: Grows) -> tuple[Product, ...]:
    """Products of groups of rows, each with its own weight (2D x 3D), and the gradients of such weights (2D x
    2D).

    Every group gets the same number of rows.
    """
    a, b, offsets = args[0], args[1], args[2]
    if a.dim() == 2 and b.dim() == 3:
        (rows, k), (groups, _, n) = a.shape, b.shape
        rows_per_group = max(1, rows // groups)
        return (Product("gemm", 2.0 * rows * n * k, (rows_per_group, n, k), 0, _layout(a, b)),)
    if a.dim() == 2 and b.dim() == 2:
        (m, rows), n = a.shape, b.shape[1]
        rows_per_group = max(1, rows // max(1, offsets.shape[0]))
        return (Product("gemm", 2.0 * rows * m * n, (m, n, rows_per_group), 2, "tn"),)
    return _batched_matmul(a, b, grows) if a.dim() == 3 and b.dim() == 3 else ()


def _convolution_shape(
    x: Tensor, weight: Tensor, y: Sequence[int], *, transposed: bool, groups: int
) -> tuple[int, int, int, int]:
    """(groups, m, n, k) of a convolution's product."""
    kernel = prod(weight.shape[2:])
    if transposed:
        return groups, x.shape[0] * prod(x.shape[2:]), weight.shape[1] * kernel, weight.shape[0] // groups
    return groups, y[0] * prod(y[2:]), weight.shape[0] // groups, weight.shape[1] * kernel


def _kind(n: int, k: int, weight: Tensor) -> str:
    """The kind of a convolution. Memory bounds convolutions of few channels."""
    return "gemm" if min(n, k // max(1, prod(weight.shape[2:]))) >= _MIN_CHANNELS or k >= 64 else "memory"


def _convolution(args: Sequence[Any], out: Any) -> tuple[Product, ...]:
    x, weight, transposed, groups = args[0], args[1], args[6], args[8]
    num_groups, m, n, k = _convolution_shape(x, weight, out.shape, transposed=transposed, groups=groups)
    return (Product(_kind(n, k, weight), 2.0 * num_groups * m * n * k, (m, n, k), 0),)


def _convolution_backward(args: Sequence[Any]) -> tuple[Product, ...]:
    """Gradients of the input and of the weight, as far as the operator's output mask requests them."""
    y, x, weight, transposed, groups, output_mask = args[0], args[1], args[2], args[7], args[9], args[10]
    num_groups, m, n, k = _convolution_shape(x, weight, y.shape, transposed=transposed, groups=groups)
    flops, kind = 2.0 * num_groups * m * n * k, _kind(n, k, weight)
    input_gradient = (Product(kind, flops, (m, k, n), 0, "nn"),) if output_mask[0] else ()
    weight_gradient = (Product(kind, flops, (n, k, m), 2, "tn"),) if output_mask[1] else ()
    return (*input_gradient, *weight_gradient)


def products_of(name: str, args: Sequence[Any], out: Any, grows: Grows) -> tuple[Product, ...]:
    """The products of an operator, or () for an operator that multiplies no matrices.

    `grows` tells whether a tensor grows with the samples.
    """
    if name == "mm":
        return _matmul(args[0], args[1], grows)
    if name == "addmm":
        return _matmul(args[1], args[2], grows)
    if name == "bmm":
        return _batched_matmul(args[0], args[1], grows)
    if name in ("baddbmm", "baddbmm_"):
        return _batched_matmul(args[1], args[2], grows)
    if name == "_grouped_mm":
        return _grouped_matmul(args, grows)
    if name in ("convolution", "_convolution", "convolution_overrideable"):
        return _convolution(args, out)
    return _convolution_backward(args) if name == "convolution_backward" else ()
