"""Tensors of mixture-of-experts layers that are kept for backward, and temporary ones.

A product keeps its rows, unless its weight is frozen. The router likewise keeps its input (in fp32 where its
product is), and its scores, twice in fp32 (the output of the function, and the map of tokens to experts with
their scores). A rearrangement keeps its indices, and the rows of `MoveCost.kept_rows`. Weights with merged
adapters are kept in full, and so are the adapters' that were cast.
"""

from __future__ import annotations

from zsim.cost.kernels.experts import routed_rows
from zsim.cost.kernels.moved_rows import move_cost
from zsim.cost.kernels.quantised_rows import computed_rows, is_grouped_fp8
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.specs.model.experts import GroupedLinear, MergedWeights, Rearrange, Router
from zsim.specs.model.spec import Module

Sizes = tuple[int, ...]
ExpertWork = Router | GroupedLinear | MergedWeights | Rearrange
_INDEX_BYTES = 8


def expert_saved_tensors(module: Module, shape: BatchShape, options: WorkOptions) -> Sizes:
    """Bytes of each tensor kept from forward to backward."""
    work, tokens, e = module.op_spec, shape.tokens, options.activation_bytes
    assert isinstance(work, ExpertWork)
    if not module.has_backward:
        return ()
    if isinstance(work, MergedWeights):
        return (_numel(work) * e, *((_factors(work) * e,) if work.casts else ()))
    shares = module.shares_input or not module.trains_weight
    if isinstance(work, Router):
        scores = tokens * work.num_experts * 4
        is_copied = work.in_fp32 and e < 4 and module.trains_weight
        input_bytes = 0 if shares and not is_copied else tokens * work.in_features * (4 if is_copied else e)
        return input_bytes, scores, scores
    if isinstance(work, GroupedLinear):
        numel = computed_rows(work, shape, options) * work.in_features
        kept_bytes = options.fp8.operand_bytes(numel) if is_grouped_fp8(work, options) else numel * e
        return (0 if shares else kept_bytes,)
    rows = routed_rows(work, shape)
    kept_bytes = int(rows * work.width * move_cost(work, options).kept_rows) * e
    indices = {"permute": 1, "select": 2}.get(work.kind, 0)
    return kept_bytes, rows * _INDEX_BYTES * indices


def expert_forward_tensors(work: ExpertWork, shape: BatchShape, options: WorkOptions) -> Sizes:
    """Bytes of each tensor that lives during forward only, the output included. Weights that are merged are
    made once before, to look at their shape (torch 2.13 nn/utils/parametrize.py).
    """
    tokens, e = shape.tokens, options.activation_bytes
    if isinstance(work, Router):
        return (tokens * work.num_experts * 4,)
    if isinstance(work, GroupedLinear):
        return (tokens * work.out_features * e,)
    if isinstance(work, MergedWeights):
        return (_numel(work) * e,)
    rows = routed_rows(work, shape)
    if work.kind in ("add", "loop"):
        return (tokens * work.width * e,)
    if work.kind == "unpermute":
        return tokens * work.width * e, _unordered_row_bytes(work, rows, options)
    return (rows * work.width * e,)


def expert_backward_tensors(work: ExpertWork, shape: BatchShape, options: WorkOptions) -> Sizes:
    """Bytes of each tensor that lives during backward only: gradients of output and input."""
    tokens, e = shape.tokens, options.activation_bytes
    if isinstance(work, Router):
        return tokens * work.num_experts * 4, tokens * work.in_features * e
    if isinstance(work, GroupedLinear):
        return tokens * work.out_features * e, tokens * work.in_features * e
    if isinstance(work, MergedWeights):
        return _numel(work) * e, _factors(work) * e
    rows = routed_rows(work, shape)
    if work.kind == "unpermute":
        return rows * work.width * e, _unordered_row_bytes(work, rows, options)
    if work.kind in ("permute", "select"):
        return rows * work.width * e, tokens * work.width * e
    return (rows * work.width * e,) * 2


def _numel(work: MergedWeights) -> int:
    """Elements of all experts' weights."""
    return work.num_experts * work.in_features * work.out_features


def _factors(work: MergedWeights) -> int:
    """Elements of both of the adapters' weights."""
    return work.num_experts * work.rank * (work.in_features + work.out_features)


def _unordered_row_bytes(work: Rearrange, rows: int, options: WorkOptions) -> int:
    """Bytes of the rows in their first order, where they are written before they are summed up. With
    transformers' scores they are fp32.
    """
    if work.library.startswith("megatron") or options.compile:
        return 0
    has_fp32_scores = work.library in ("transformers", "autoep", "deepspeed-moe")
    return rows * work.width * (4 if has_fp32_scores else options.activation_bytes)
