"""The kernels of torchtitan's layers and losses, and of torchtune's loss.

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

# torchtune's `CEWithChunkedOutputLoss` (0.3 to 0.6, modules/loss/ce_chunked_output_loss.py): the 16-bit
# logits of all eight chunks exist, which are cast and reduced one after the other. Compiled, a chunk is
# `FUSED`, and its gradient takes the place of the logits of the chunk before it. Eager, log-probabilities of
# all chunks are kept, and the loop's logits are there until backward, which then has no more than forward
# had. Measured: the rows on Llama 3.2 3B of torchtune's README (0.4, "Optimization flags") with gradients
# that are updated in backward, or with adapters. Neglected: the head's weight has two gradients while those
# of its chunks are added.
CHUNKED_LOGITS_FUSED = replace(FUSED, name="torchtune-chunked-fused", num_chunks=8)
CHUNKED_LOGITS = replace(
    EAGER,
    name="torchtune-chunked",
    forward=replace(EAGER.forward, temporaries=LossTensors((4,), (4,))),
    backward=replace(EAGER.backward, temporaries=LossTensors()),
    keeps_logits=True,
    num_chunks=8,
)

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
LOSSES = {loss.name: loss for loss in (CHUNKED_LOGITS, CHUNKED_LOGITS_FUSED, CHUNKED, CHUNKED_FUSED)}
