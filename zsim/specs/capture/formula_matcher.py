"""Formulas for groups of operators: a group that matches one exactly gets its op spec, others stay traced.

Formulas know more than a trace: other kernels of norms and losses, fp8 products, attention that is written
out. They hold only if the rows of a product are the tokens of the sample, its input and its weight both get a
gradient, and attention is causal over the whole sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zsim.specs.capture.groups import OperatorGroup
from zsim.specs.capture.recording import ModuleRecording, Operator, Use
from zsim.specs.model.spec import (
    Activation,
    Attention,
    Embedding,
    Linear,
    Loss,
    Norm,
    Operation,
    Residual,
)

# transformers' `LlamaRMSNorm`: what `zsim.cost.kernels.elementwise` counts as an RMSNorm in eager mode.
_RMS_NORM = ("_to_copy", "pow", "mean", "add", "rsqrt", "mul", "_to_copy", "mul")
_ACTIVATIONS = {
    ("silu",): "silu",
    ("gelu",): "gelu",
    ("relu",): "relu",
    ("tanh",): "tanh",
    ("mul", "pow", "mul", "add", "mul", "tanh", "add", "mul"): "gelu_new",
    ("pow", "mul", "add", "mul", "tanh", "add", "mul", "mul"): "gelu_new",
}
_LABELS = {"constant_pad_nd", "clone", "slice", "fill", "full", "_to_copy", "copy", "ne", "sum", "new_full"}


@dataclass(frozen=True, slots=True)
class FormulaMatch:
    """An op spec with a formula, which a group of operators matches."""

    op_spec: Operation
    shares_input: bool = False
    """As in `Module`."""
    summed_numel: int = 0
    """Elements of the gradient whose addition the formula counts, 0 without."""


class FormulaMatcher:
    """Finds formulas for groups of operators. `tokens` is the number of positions in all samples of the
    example.
    """

    def __init__(self, recording: ModuleRecording, tokens: int) -> None:
        self.recording, self.tokens = recording, tokens

    def match(self, group: OperatorGroup, saved_before: set[int], is_leaf: bool) -> FormulaMatch | None:
        """The formula of a group, or None if there is none.

        `saved_before` holds the storages that earlier groups of its segment keep for backward. `is_leaf` says
        that the group is a module without children.
        """
        rules: list[Callable[[OperatorGroup, set[int]], FormulaMatch | None]]
        rules = [self._linear, self._norm, self._embedding, self._activation] if is_leaf else []
        for rule in [*rules, self._attention, self._residual, self._loss]:
            match = rule(group, saved_before)
            if match is not None:
                return match
        return None

    def _storage(self, use: Use) -> Any:
        return self.recording.storages[use.storage]

    def _linear(self, group: OperatorGroup, saved_before: set[int]) -> FormulaMatch | None:
        if _names(group.forward) not in (("mm",), ("addmm",)):
            return None
        (operator,) = group.forward
        (product,) = operator.products
        rows, out_features, in_features = product.shape
        backward = group.module_backward
        shapes = sorted(op.products[0].shape for op in backward if op.products)
        expected_shapes = sorted([(rows, in_features, out_features), (out_features, in_features, rows)])
        transposed_shapes = sorted([(rows, in_features, out_features), (in_features, out_features, rows)])
        if rows != self.tokens or product.scaled != 0 or shapes not in (expected_shapes, transposed_shapes):
            return None
        has_bias = operator.name == "addmm"
        other_operators = [op.name for op in backward if not op.products]
        if other_operators != (["sum"] if has_bias else []) or not self._weight(operator):
            return None
        input_storages = [use.storage for use in operator.reads if self._storage(use).grows]
        shares = not group.saved and input_storages[0] in saved_before
        if len(group.saved) > 1 or (not group.saved and not shares):
            return None
        return FormulaMatch(Linear(in_features, out_features), shares, rows * in_features if shares else 0)

    def _weight(self, operator: Operator) -> bool:
        return any(self._storage(use).parameter for use in operator.reads)

    def _numel_per_token(self, uses: Sequence[Use]) -> int | None:
        """Elements per token of the largest tensor that grows, or None if they are not a whole number."""
        numel = max((use.numel for use in uses if self._storage(use).grows), default=0)
        return numel // self.tokens if numel and numel % self.tokens == 0 else None

    def _norm(self, group: OperatorGroup, saved_before: set[int]) -> FormulaMatch | None:
        names = _names(group.forward)
        kind = {("native_layer_norm",): "layer", _RMS_NORM: "rms"}.get(names)
        if kind is None or not group.module_backward or not self._all_low_inputs(group):
            return None
        width = self._numel_per_token(group.forward[0].reads)
        if kind == "layer" and _names(group.module_backward) != ("native_layer_norm_backward",):
            return None
        if width is None:
            return None
        low = [n for n in group.saved if self.recording.storages[n].is_low]
        shares = kind == "layer" and not low
        return FormulaMatch(Norm(width, kind), shares and bool(saved_before))

    def _all_low_inputs(self, group: OperatorGroup) -> bool:
        return any(self._storage(use).is_low for use in group.forward[0].reads)

    def _embedding(self, group: OperatorGroup, saved_before: set[int]) -> FormulaMatch | None:
        if _names(group.forward) != ("embedding",) or _names(group.module_backward) != (
            "embedding_dense_backward",
        ):
            return None
        (operator,) = group.forward
        table = next((use for use in operator.reads if self._storage(use).parameter), None)
        width = self._numel_per_token(operator.writes)
        if table is None or width is None or not self._storage(operator.writes[0]).grows:
            return None
        rows = self._storage(table).num_bytes // table.item_bytes // width
        return FormulaMatch(Embedding(rows, width))

    def _activation(self, group: OperatorGroup, saved_before: set[int]) -> FormulaMatch | None:
        name = _ACTIVATIONS.get(_names(group.forward))
        width = self._numel_per_token(group.forward[-1].writes) if group.forward else None
        if name is None or width is None or not group.module_backward:
            return None
        num_saved = 4 if name == "gelu_new" else 0 if name == "relu" else 1
        saved_storages = [self.recording.storages[number] for number in group.saved]
        has_own_size = {storage.num_bytes // storage.item_bytes for storage in saved_storages} <= {
            width * self.tokens
        }
        if len(saved_storages) != num_saved or not has_own_size:  # a part of a wider tensor keeps all of it
            return None
        return FormulaMatch(Activation(width, False, name))

    def _attention(self, group: OperatorGroup, saved_before: set[int]) -> FormulaMatch | None:
        backward = _names(group.module_backward)
        if _names(group.forward) != ("fused attention",) or backward != ("fused attention backward",):
            return None
        (product,) = group.forward[0].products
        batch_heads, queries, keys, width = product.shape
        samples, length = self.recording.samples, self.tokens // self.recording.samples
        covers_sample = queries == keys == length and batch_heads == samples * product.heads
        if not (product.is_causal and covers_sample) or product.has_mask:
            return None
        return FormulaMatch(
            Attention(
                product.heads, product.kv_heads, width, product.v_head_dim,
                rotary=False, dropout=product.dropout,
            )
        )  # fmt: skip

    def _residual(self, group: OperatorGroup, saved_before: set[int]) -> FormulaMatch | None:
        """An addition of two tensors of the stream's width."""
        if _names(group.forward) not in (("add",), ("add_",)) or group.module_backward or group.saved:
            return None
        (operator,) = group.forward
        sizes = {use.numel for use in operator.reads}
        is_low = all(self._storage(use).is_low and self._storage(use).grows for use in operator.reads)
        width = self._numel_per_token(operator.reads)
        if len(operator.reads) != 2 or len(sizes) != 1 or not is_low or width is None:
            return None
        return FormulaMatch(Residual(width), summed_numel=sizes.pop())

    def _loss(self, group: OperatorGroup, saved_before: set[int]) -> FormulaMatch | None:
        names = _names(group.forward)
        is_cast = "_to_copy" in names[:-2]
        if (
            names[-2:] != ("_log_softmax", "nll_loss_forward")
            or not is_cast
            or not set(names[:-2]) <= _LABELS
        ):
            return None
        backward_names = [operator.name for operator in group.module_backward if operator.name != "_to_copy"]
        if backward_names != ["nll_loss_backward", "_log_softmax_backward_data"]:
            return None
        width = self._numel_per_token(group.forward[-2].writes)
        return None if width is None else FormulaMatch(Loss(width))


def _names(operators: Sequence[Operator]) -> tuple[str, ...]:
    return tuple(operator.name for operator in operators)
