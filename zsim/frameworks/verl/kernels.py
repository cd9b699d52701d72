"""The loss of verl's trainers on FSDP: log-probabilities and, where the file asks for it, entropy.

Passes over logits of 16 bits counted at b178a3cd. `verl` (verl/workers/actor/dp_actor.py, verl/utils/
torch_functional.py `logprobs_from_logits`): the temperature divides the logits in place, and flash-attn's
cross-entropy goes over them twice. Backward writes the gradient over the logits, and the temperature's is a
tensor of its own.

`verl-entropy` is with `entropy_coeff` or `calculate_entropy`: a compiled softmax, logsumexp and sum go over
the logits three times more. Backward has a gradient of the entropy beside that of log-probabilities, which is
not written over the logits then, and adds both.
"""

from __future__ import annotations

from zsim.cost.kernels.losses import LossKernelSet, LossPasses, LossTensors

_PLAIN = LossKernelSet(
    "verl",
    forward=LossPasses(3, logits=4),
    backward=LossPasses(2, logits=4, temporaries=LossTensors((2,), (4,))),
    keeps_logits=True,
)
_ENTROPY = LossKernelSet(
    "verl-entropy",
    forward=LossPasses(4, logits=7),
    backward=LossPasses(4, logits=9, temporaries=LossTensors((2, 2), (4, 4))),
    keeps_logits=True,
)
LOSSES = {loss.name: loss for loss in (_PLAIN, _ENTROPY)}
