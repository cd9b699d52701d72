"""The kernels of torchtitan's layers and losses.

nn.RMSNorm is torch's own (v0.2.2 models/llama3/model/model.py). Until 0.3 the loss is torch's, eager or
compiled. From then on (786e26f8 of April 2026, components/loss.py) it runs with the head over eight chunks of
the sequence, and `compile` with "loss" among its components compiles what a chunk calls. The labels are
shifted by the loader, so the fp32 logits have no copy.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.cost.kernels.layer_kernels import LayerKernelSet
from zsim.cost.kernels.losses import EAGER, FUSED, LossKernelSet, LossTensors

TORCHTITAN_LAYERS = LayerKernelSet("torchtitan", has_native_norms=True)
LAYER_KERNELS = {TORCHTITAN_LAYERS.name: TORCHTITAN_LAYERS}

CHUNKED = LossKernelSet(
    "torchtitan-chunked",
    forward=replace(EAGER.forward, temporaries=LossTensors((4,), ())),
    backward=EAGER.backward,
    kept=EAGER.kept,
    includes_head=True,
    num_tiles=8,
    sums_in_fp32=True,
)
CHUNKED_FUSED = replace(
    CHUNKED,
    name="torchtitan-chunked-fused",
    forward=FUSED.forward,
    backward=FUSED.backward,
    kept=LossTensors(),
)
LOSSES = {loss.name: loss for loss in (CHUNKED, CHUNKED_FUSED)}
