"""The losses of prime-rl's trainer of RL: log-probabilities and, without gradients, entropy.

Passes over logits counted at 559b4477. `prime-rl-chunked`, the default, is the autograd function of
src/prime_rl/trainer/models/layers/lm_head.py, in eager kernels over chunks of 8,192 tokens
(`fused_lm_head_token_chunk_size`) and 8,192 words. Forward: a cast to fp32, the temperature, the largest
logit, a difference, an exponential, its sum, its product with the logits and that product's sum. Backward,
after the same product: the cast, the temperature, a difference, an exponential, the gradient of
log-probabilities, the label's place, the temperature, and a cast for each of its two products. From the
second chunk on probabilities and gradient of the one before are still there, as Python's names hold them.

`prime-rl-words` is the same before 93cd1fa3 of March 2026 (11d87ee8): chunks of 2,048 words over all tokens
of a micro-batch, and a gradient of the weight even where adapters are trained.

`prime-rl` is the other head: all logits in fp32, divided by the temperature, and two compiled functions
(trainer/rl/loss.py), of which the first goes over them twice, the second three times, and backward once, to
write their gradient.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from zsim.cost.kernels.losses import LossKernelSet, LossPasses, LossTensors

CHUNK = 8192
WHOLE = LossKernelSet(
    "prime-rl",
    forward=LossPasses(6, fp32=7, casts=1),
    backward=LossPasses(3, fp32=4, casts=1, temporaries=LossTensors((4, 4), (4, 4))),
    kept=LossTensors((4, 4), (4,)),
)
CHUNKED = LossKernelSet(
    "prime-rl-chunked",
    forward=LossPasses(22, fp32=12, casts=1, temporaries=LossTensors((4, 4, 4), (4, 4, 4))),
    backward=LossPasses(13, fp32=10, casts=3, temporaries=LossTensors((4, 4, 4, 4, 4), (4, 4, 4, 4, 4))),
    includes_head=True,
    checkpointed_tokens=CHUNK,
    chunked_words=CHUNK,
)
WORDS = replace(
    CHUNKED,
    name="prime-rl-words",
    checkpointed_tokens=sys.maxsize,
    chunked_words=2048,
    trains_frozen_head=True,
)
LOSSES = {loss.name: loss for loss in (WHOLE, CHUNKED, WORDS)}
