"""The heads of attention's projections, each of which is a separate matrix for DeepSpeed's Muon with
`per_head_muon`.

DeepSpeed 0.19.8 `__init__.py` (`_classify_leaf`, `_geometry_candidates`, `_confirm`,
`resolve_per_head_muon_after_sharding`): by the last part of their module's name, where their rows are as many
as heads of the width that the config says. Fused projections and multi-head latent attention's down ones are
left whole. `original_muon.py` `_per_head_orthogonalize`: heads are one batch of matrices.
"""

from __future__ import annotations

from zsim.specs.model.spec import Attention, ModelSpec

Shape = tuple[int, ...]
_QUERIES = ("q_proj", "query", "wq", "q_b_proj")
_KEYS, _VALUES = ("k_proj", "key", "wk"), ("v_proj", "value", "wv")
_LATENT = "kv_b_proj"
_UNSPLIT = (
    "qkv_proj", "query_key_value", "c_attn", "in_proj_qkv", "wqkv",
    "q_a_proj", "kv_a_proj", "kv_a_proj_with_mqa",
)  # fmt: skip


def head_matrices(model: ModelSpec) -> dict[str, Shape]:
    """The shape (heads, width, columns) of each projection that is split by heads, by its name."""
    attentions = [
        module.op_spec
        for block in model.unique_blocks
        for module in block.modules
        if isinstance(module.op_spec, Attention)
    ]
    shapes: dict[str, Shape] = {}
    for name, parameter in model.named_parameters():
        components = name.split(".")
        leaf = components[-2].lower() if len(components) > 1 else ""
        if len(parameter.shape) != 2 or leaf.startswith(_UNSPLIT):
            continue
        counts = {
            heads
            for work in attentions
            for heads, width in _heads_of(leaf, work)
            if heads * width == parameter.shape[0]
        }
        if len(counts) == 1:
            heads = counts.pop()
            shapes[name] = (heads, parameter.shape[0] // heads, parameter.shape[1])
    return shapes


def _heads_of(leaf: str, work: Attention) -> list[tuple[int, int]]:
    """(heads, width of each) that a projection of this name may have."""
    if leaf.startswith(_LATENT):
        return [(work.num_heads, _unrotated(work) + work.v_head_dim)] if work.is_latent else []
    if leaf.startswith(_KEYS):
        return [(work.num_kv_heads, work.qk_head_dim)]
    if leaf.startswith(_VALUES):
        return [(work.num_kv_heads, work.v_head_dim)]
    return [(work.num_heads, work.qk_head_dim)] if leaf.startswith(_QUERIES) else []


def _unrotated(work: Attention) -> int:
    return work.qk_head_dim - (work.rotary_width or 0)
