"""The kernels of layers in Megatron-LM, and in the libraries whose jobs are described as Megatron's."""

from __future__ import annotations

from zsim.cost.kernels.layer_kernels import LayerKernelSet

# Megatron-LM's from its persistent norm of October 2021 on, which 3.0 is the first release to have.
# Mixers: d98e8a64 core/ssm/gated_delta_net/gdn.py, core/ssm/mamba_mixer.py.
MEGATRON = LayerKernelSet(
    "megatron",
    joins_norms=False,
    scales_rotary_eagerly=True,
    repeats_normalised_heads=True,
    norms_after_scans=True,
    has_sparse_attention=True,
)
# Those before, with Apex's norm.
MEGATRON_2 = LayerKernelSet(
    "megatron-2", joins_norms=False, has_two_pass_layer_norm=True, scales_rotary_eagerly=True
)
# Beside Liger's kernels.
NANOTRON = LayerKernelSet("nanotron", joins_norms=False, splits_gates=True, copies_heads=True)
INTERNEVO = LayerKernelSet("internevo", joins_norms=False, casts_norms=True)

LAYER_KERNELS = {kernels.name: kernels for kernels in (MEGATRON, MEGATRON_2, NANOTRON, INTERNEVO)}
