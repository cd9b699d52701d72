"""The kernels of torchtitan's layers: nn.RMSNorm is torch's own (v0.2.2 models/llama3/model/model.py)."""

from __future__ import annotations

from zsim.cost.kernels.layer_kernels import LayerKernelSet

TORCHTITAN_LAYERS = LayerKernelSet("torchtitan", has_native_norms=True)
LAYER_KERNELS = {TORCHTITAN_LAYERS.name: TORCHTITAN_LAYERS}
