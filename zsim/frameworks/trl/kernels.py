"""The losses of TRL's SFT trainer: passes over logits counted in trainer/sft_trainer.py and trainer/utils.py
(1.10.0.dev0, f2cd5771), under the autocast of accelerate's `prepare_model`.

`nll`, the default from 0.20 to 1.9: transformers' loss, `convert_outputs_to_fp32` of all logits, and without
gradients the entropy of every row in chunks of 128 (`entropy_from_logits`: log-softmax, an exponential, a
product, a sum) and the largest logit, for the log. The fp32 logits are freed with the model's output, before
backward. The launches of the chunks are not counted one by one.

`chunked_nll`, the default from 1.10 on: head and loss in checkpoints of 256 tokens (`_chunk`), each with the
entropy and the largest logit. Gradients pass through neither. `w.float()` and autocast's cast of it run in
every chunk, forward and again in backward, as what autocast caches are parameters and no views of them
(counted with a dispatch mode under torch 2.13).
"""

from __future__ import annotations

from dataclasses import replace

from zsim.cost.kernels.losses import EAGER, LossKernelSet, LossPasses, LossTensors

_EXPONENTIAL, _LARGEST = 2, 1  # tensors that are read and written
_ENTROPY = _EXPONENTIAL + 4  # with a product and a sum
_LOG_SOFTMAX = 4  # in fp32 over long rows, see [Note: how often log-softmax reads a row]

NLL = LossKernelSet(
    "trl",
    forward=replace(
        EAGER.forward,
        launches=EAGER.forward.launches + 6,
        fp32=_LOG_SOFTMAX + _ENTROPY + _LARGEST,
        casts=EAGER.forward.casts + 1,
    ),
    backward=EAGER.backward,
    kept=EAGER.kept,
)
CHUNKED = LossKernelSet(
    "trl-chunked",
    forward=LossPasses(
        10,
        logits=_LARGEST,
        fp32=_ENTROPY,
        casts=1,
        log_softmax="fp32",
        picks_labels=True,
        temporaries=LossTensors((4, 4), (4, 4)),
    ),
    backward=replace(  # behind the same forward again, up to the last tensor that is kept: the exponential
        EAGER.backward,
        launches=EAGER.backward.launches + 5,
        logits=_LARGEST,
        fp32=EAGER.backward.fp32 + _LOG_SOFTMAX + _EXPONENTIAL,
        casts=EAGER.backward.casts + 1,
        picks_labels=True,
    ),
    kept=LossTensors((4, 4), (4, 4)),
    includes_head=True,
    checkpointed_tokens=256,
)

LOSSES = {loss.name: loss for loss in (NLL, CHUNKED)}
