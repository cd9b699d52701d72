"""The kernels that a library has for norms, activations and rotary positions, where they are fused."""

from __future__ import annotations

from dataclasses import dataclass

from zsim.cost.kernels.passes import Passes


@dataclass(frozen=True, slots=True)
class LayerKernelSet:
    """The library whose fused kernels `compile`, or `liger`, stands for, by what its kernels do."""

    name: str = "torch"
    """The value of `training.layer_kernels`."""
    joins_norms: bool = True
    """Compiled, the residual add and its dropout are in the next norm's kernel, and the scores' dropout in
    that of softmax.
    """
    has_two_pass_layer_norm: bool = False
    """Compiled, LayerNorm is a kernel that goes over a row as torch's own does."""
    multiplies_by_mask: bool = False
    """Written-out scores are multiplied by the mask, and what is masked is subtracted: a kernel more."""
    adds_biases: bool = False
    """A bias is added to its product by a kernel of its own."""
    has_native_norms: bool = False
    """Without `compile`, RMSNorm is torch's own kernel. See [Note: torch's RMSNorm]."""
    casts_norms: bool = False
    """Beside Liger's kernels, norms cast the stream to fp32 and run again before backward."""
    splits_gates: bool = False
    """A gated activation splits the output of one product, in eager kernels."""
    copies_heads: bool = False
    """Queries, keys and values are copied around attention."""
    replaces_fused_projection: bool = False
    """Compiled, rotated queries and keys take the place of a fused projection, of which v is a slice."""
    scaled_rotary: tuple[Passes, Passes] | None = None
    """Rotary positions that are multiplied by a factor are eager kernels, of these passes per tensor forward
    and backward. None where they are fused as all others.
    """
    repeats_normalised_heads: bool = False
    """Gated DeltaNet normalises queries and keys before it repeats their heads, and keeps both."""
    norms_after_scans: bool = False
    """The norm behind Mamba-2's scan is a kernel of its own, which keeps its input."""
    gates_in_kernel: bool = False
    """The kernel of Kimi delta attention makes its decays."""
    has_sparse_attention: bool = False
    """Attention over chosen keys has kernels that compute no others."""
