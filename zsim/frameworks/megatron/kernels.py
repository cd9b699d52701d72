"""The kernels of Megatron-LM, and of the libraries whose jobs are described as Megatron's."""

from __future__ import annotations

from dataclasses import replace

from zsim.cost.kernels.layer_kernels import LayerKernelSet, Passes, StridedPasses
from zsim.cost.kernels.losses import LossKernelSet, LossPasses, LossTensors
from zsim.cost.kernels.moved_rows import (
    INDEX_ADD,
    SCATTER_ADD,
    TRANSFORMER_ENGINE_KERNELS,
    ExpertKernelSet,
    MoveCost,
    RowPasses,
    ScoreCost,
)
from zsim.specs.strategy.expert_library import ExpertLibrary

# Rotary positions where Transformer Engine's kernel does not take the factor by which YaRN multiplies cosines
# (core 0.16.1 core/models/common/embeddings/rope_utils.py `apply_rotary_pos_emb`, `mscale`). Per tensor,
# counted with a dispatch mode: forward a product with cosines, half of the features negated, both halves
# concatenated, a product with sines, their sum, concatenated with the nothing that is not rotated; backward
# two products, a negation, a concatenation, a sum, and zeros for that nothing, which are added. Launches on
# cosines aside.
_ROTATED = StridedPasses(5, 3, 2.5, has_many_dimensions=True)
_SCALED_ROTARY = (Passes(12, 6, _ROTATED), Passes(14, 7, _ROTATED))

# Megatron-LM's from its persistent norm of October 2021 on, which 3.0 is the first release to have.
# Mixers: d98e8a64 core/ssm/gated_delta_net/gdn.py, core/ssm/mamba_mixer.py. The fused projection: peaks of
# training_runs simumax-b200 (role calibrate), within 0.3 % without it and up to 1.3 % too high with it.
_MEGATRON_LAYERS = LayerKernelSet(
    "megatron",
    joins_norms=False,
    replaces_fused_projection=True,
    scaled_rotary=_SCALED_ROTARY,
    repeats_normalised_heads=True,
    norms_after_scans=True,
    gates_in_kernel=True,
    has_sparse_attention=True,
)
# Of a release from 0.19 on, and without Transformer Engine's kernel of rotary positions.
_CORE_19_LAYERS = replace(_MEGATRON_LAYERS, name="megatron-0.19", rotates_by_document=True)
_EAGER_ROTARY = tuple(
    replace(kernels, name=f"{kernels.name}-eager-rope", has_eager_rotary=True)
    for kernels in (_MEGATRON_LAYERS, _CORE_19_LAYERS)
)
# Those before, with Apex's norm.
_MEGATRON_2_LAYERS = LayerKernelSet(
    "megatron-2",
    joins_norms=False,
    replaces_fused_projection=True,
    has_two_pass_layer_norm=True,
    scaled_rotary=_SCALED_ROTARY,
)
# Megatron-LM 1's, as DeepSpeedExamples has it (35b45824 Megatron-LM/mpu/transformer.py and layers.py): eager
# kernels, scores times the mask less 10,000 where it is 0, and, of torch before 1.12, `F.linear` of three
# dimensions, which adds a bias after the product as `RowParallelLinear` does.
_MEGATRON_1_LAYERS = LayerKernelSet("megatron-1", multiplies_by_mask=True, adds_biases=True)
# Beside Liger's kernels.
_NANOTRON_LAYERS = LayerKernelSet("nanotron", joins_norms=False, splits_gates=True, copies_heads=True)
_INTERNEVO_LAYERS = LayerKernelSet("internevo", joins_norms=False, casts_norms=True)

LAYER_KERNELS = {
    kernels.name: kernels
    for kernels in (
        _MEGATRON_LAYERS,
        _CORE_19_LAYERS,
        *_EAGER_ROTARY,
        _MEGATRON_2_LAYERS,
        _MEGATRON_1_LAYERS,
        _NANOTRON_LAYERS,
        _INTERNEVO_LAYERS,
    )
}

# Megatron-LM's `vocab_parallel_cross_entropy` (`mpu/cross_entropy.py`, unfused). Forward: `float()`, maximum,
# subtract in place, exp, sum, divide in place. Backward: scale in place, cast. Keeps the fp32 softmax, which
# becomes the gradient. Temporaries: the 16-bit logits forward, the cast backward. Measured: a GPT of 12
# layers of 512 with 50,304 entries, 4 x 1,024 tokens, has its peak there (training_runs megatron-ci).
LOSS = LossKernelSet(
    "megatron",
    forward=LossPasses(5, fp32=8, casts=1, temporaries=LossTensors((2,), (4,))),
    backward=LossPasses(2, fp32=2, casts=1, temporaries=LossTensors((2,), (4,))),
    kept=LossTensors((4,), (4,)),
)

# Before Megatron-Core 0.8 the subtraction was not in place: an fp32 copy more forward.
_LOGITS_AND_COPY = LossTensors((4, 2), (4, 4))
LOSS_BEFORE_0_8 = replace(
    LOSS, name="megatron-before-0.8", forward=replace(LOSS.forward, temporaries=_LOGITS_AND_COPY)
)

# Megatron-LM 1's clones the fp32 logits first (DeepSpeedExamples 35b45824 Megatron-LM/mpu/cross_entropy.py).
LOSS_1 = replace(
    LOSS, name="megatron-1", forward=LossPasses(6, fp32=10, casts=1, temporaries=_LOGITS_AND_COPY)
)

# `--cross-entropy-loss-fusion` as it is implemented by default (`native`,
# core/fusions/fused_cross_entropy.py: functions under torch.compile, between which the sums go over the
# group). Forward: cast and maximum in one kernel, subtract (written back, as the function's argument is
# changed) and exp, divide in place. Backward: one kernel reads the softmax, changes it and writes the 16-bit
# gradient. Keeps the fp32 softmax. The fp32 logits are another temporary. Measured: 4.4 bytes per logit more
# than unfused (training_runs megatron-ci-0073 less its workspaces, role calibrate). Transformer Engine's
# (`te`) is "fused".
FUSED_LOSS = replace(
    LOSS,
    name="megatron-fused",
    forward=LossPasses(3, logits=1, fp32=6, temporaries=_LOGITS_AND_COPY),
    backward=LossPasses(1, logits=1, fp32=2, temporaries=LossTensors((2,), (4,))),
)

LOSSES = {loss.name: loss for loss in (LOSS, LOSS_BEFORE_0_8, LOSS_1, FUSED_LOSS)}


# Routed experts: Megatron-Core 0.16.1 `core/transformer/moe/`, counted as [Note: rows that move] of
# `zsim.cost.kernels.moved_rows` says. moe_utils.py `permute`, `unpermute`, `sort_chunks_by_idxs`: a gather by
# a transposed mask, and zeros and a scatter that adds. The scores are a factor of the activation. The map of
# tokens to experts is two tensors filled with zeros and scattered into (`topk_routing_with_score_function`),
# beside torch's kernels of scores.
_KERNELS = ExpertKernelSet(
    "megatron",
    permute=MoveCost(RowPasses(0, 2, 12), RowPasses(1, 0, 6, INDEX_ADD)),
    unpermute=MoveCost(RowPasses(1, 0, 4, SCATTER_ADD), RowPasses(0, 2, 3)),
    scores=ScoreCost(12 + 10, 5 + 6, 18 + 4, 6 + 1),
)
_FUSED_KERNELS = replace(TRANSFORMER_ENGINE_KERNELS, name="megatron-fused", scores=_KERNELS.scores)

MEGATRON = ExpertLibrary(
    name="megatron",
    title="Megatron",
    owner="Megatron",
    kernels=_KERNELS,
    dispatch="rows and scores",
    splits_like_products=True,
    needs_sequence_parallelism=True,
    drops_tokens=True,
    waits_for_counts=True,
    runs_shared_first=True,
    casts_gate_output=True,
    clamps_quick_gelu=True,
    scores_activations=True,
    scales_biases=True,
)
# --moe-permute-fusion
MEGATRON_FUSED = replace(MEGATRON, name="megatron-fused", kernels=_FUSED_KERNELS)
