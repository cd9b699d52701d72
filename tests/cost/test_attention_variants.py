"""Windows, chunks, caps, sinks, biases and partly rotated heads: how much work and memory each is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zsim.cost.kernels.kernel import total_flops
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.cost.rates.gpu import kernel_seconds
from zsim.errors import NotSimulatedError
from zsim.operations import BACKWARD, FORWARD
from zsim.operations.attention.kernels import attended_pairs
from zsim.plan.make import make_plan
from zsim.specs.cluster.files import load_gpu
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.model.spec import Activation, Attention, Module, Norm, Residual

SHAPE = BatchShape(2, 64)
TOKENS, SCORES = 128, 2 * 4 * 64 * 64
FLASH, MATH = WorkOptions(), WorkOptions(attention="math")


def module(**changes: Any) -> Module:
    work = Attention(num_heads=4, num_kv_heads=4, qk_head_dim=16, v_head_dim=16, rotary=False)
    return Module("core", replace(work, **changes))


def moved(one: Module, options: WorkOptions) -> tuple[float, float]:
    """HBM bytes forward and backward."""
    forward, backward = one.kernels(FORWARD, SHAPE, options), one.kernels(BACKWARD, SHAPE, options)
    return sum(kernel.hbm_bytes for kernel in forward), sum(kernel.hbm_bytes for kernel in backward)


def more(options: WorkOptions, **changes: Any) -> tuple[float, float, int]:
    """HBM bytes forward and backward, and bytes kept, beyond attention without `changes`."""
    plain = {"upcasts_softmax": changes["upcasts_softmax"]} if "upcasts_softmax" in changes else {}
    with_it, without = module(**changes), module(**plain)
    a, b = moved(with_it, options), moved(without, options)
    kept = with_it.saved_bytes(SHAPE, options) - without.saved_bytes(SHAPE, options)
    return a[0] - b[0], a[1] - b[1], kept


@pytest.mark.parametrize(
    ("changes", "pairs"),
    [
        ({}, 64 * 64 / 2),
        ({"window": 16}, 16 * 64 - 16 * 16 / 2),
        # chunks of 24, 24 and 16 tokens
        ({"chunk": 24}, (24**2 + 24**2 + 16**2) / 2),
        ({"chunk": 100}, 64 * 64 / 2),
        ({"is_causal": False}, 64 * 64),
        # |i - j| <= 5: 11 keys each, less 2 (5 + 4 + 3 + 2 + 1) beyond the ends
        ({"is_causal": False, "window": 5}, 11 * 64 - 30),
        ({"is_causal": False, "window": 500}, 64 * 64),
    ],
)
def test_pairs_of_queries_and_keys(changes: dict[str, Any], pairs: float) -> None:
    work = module(**changes).op_spec
    assert isinstance(work, Attention)
    assert attended_pairs(work, 64) == pairs


def test_a_fused_kernel_has_the_layer_s_window_where_it_is_shorter() -> None:
    """64 tokens; both ways a window of w on each side is 2 w + 1 keys."""
    found = {}
    for window in (16, 64, None):
        for causal in (True, False):
            one = module(window=window, is_causal=causal)
            kernels = (*one.kernels(FORWARD, SHAPE, FLASH), *one.kernels(BACKWARD, SHAPE, FLASH))
            (found[window, causal],) = {each.window for each in kernels if each.kind.startswith("attention")}
    assert found == {(16, True): 16, (16, False): 33, **dict.fromkeys(
        ((window, causal) for window in (64, None) for causal in (True, False)), 0
    )}  # fmt: skip


def test_chunks_are_sequences_of_their_own() -> None:
    """64 tokens in chunks of 16 are 8 sequences of 16: the same kernels."""
    chunked, whole, short = (
        [
            one
            for in_pass in (FORWARD, BACKWARD)
            for one in core.kernels(in_pass, shape, FLASH)
            if "attention" in one.kind
        ]
        for core, shape in (
            (module(chunk=16), SHAPE), (module(chunk=64), SHAPE),
            (module(), BatchShape(8, 16)),
        )
    )  # fmt: skip
    assert [one.shape for one in chunked] == [(32, 16, 16, 16)] * 2
    assert [one.shape for one in whole] == [(8, 64, 64, 16)] * 2
    assert chunked == short


@pytest.mark.parametrize(("length", "is_said"), [(8192, False), (16384, True)])
def test_chunks_shorter_than_sequences_are_flex_attention(length: int, is_said: bool) -> None:
    """Llama 4's chunks of 8,192 tokens; FlexAttention has no curve of its own. Context parallelism is refused
    where they cut sequences."""
    asked: dict[str, Any] = {
        "model": "llama-4-scout", "cluster": "dgx-h100", "nodes": 16, "strategy": {"kind": "fsdp2"},
        "training": {"sequence_length": length},
    }  # fmt: skip
    notes = resolve(Experiment(**asked)).notes
    assert any("in chunks is torch's FlexAttention" in note for note in notes) is is_said
    asked["parallelism"] = {"context": 2}
    if is_said:
        with pytest.raises(NotSimulatedError, match="is in chunks"):
            resolve(Experiment(**asked))
    else:
        assert resolve(Experiment(**asked)).parallelism.context == 2


def test_deterministic_backward_sums_the_gradient_of_queries_in_several_buffers() -> None:
    """2 sequences of 4 heads on 108 SMs: ceil(108 / 8) = 14 buffers of fp32 for 128 tokens of 4 x 16, one
    without."""
    split = replace(FLASH, deterministic_sms=108)
    made = [module().backward_extra_bytes(SHAPE, options) for options in (FLASH, split)]
    assert made[1] - made[0] == 13 * 4 * TOKENS * 4 * 16
    passing = [sum(module().tensors(SHAPE, options).backward) for options in (FLASH, split)]
    assert passing == made


def test_gradients_of_scores_go_through_memory_once_each_way() -> None:
    """4,096 tokens of 32 heads on H100: 2 bytes each of 4,096 x 4,096 / 2 scores a head are written and read,
    at what elementwise kernels reach of 3.35 TB/s; the workspace has all 4,096 squared."""
    gpu = load_gpu("h100-sxm-80gb")
    writes = gpu.model_copy(update={"attention": gpu.attention.model_copy(update={"writes_scores": True})})
    work = module(num_heads=32, num_kv_heads=32, qk_head_dim=128, v_head_dim=128)
    shape = BatchShape(1, 4096)
    (kernel,) = (one for one in work.kernels(BACKWARD, shape, FLASH) if one.kind == "attention_backward")
    more = kernel_seconds(kernel, writes) - kernel_seconds(kernel, gpu)
    moved_bytes = 2 * 2 * 32 * 4096 * 4096 / 2
    assert more == pytest.approx(moved_bytes / (3.35e12 * gpu.memory_bound.elementwise_fraction))
    options = replace(FLASH, writes_scores=True)
    extra = work.backward_extra_bytes(shape, options) - work.backward_extra_bytes(shape, FLASH)
    assert extra == 2 * 32 * 4096**2
    assert kernel_seconds(work.kernels(FORWARD, shape, FLASH)[0], writes) == pytest.approx(
        kernel_seconds(work.kernels(FORWARD, shape, FLASH)[0], gpu)
    )


def test_a_plan_has_the_buffers_of_every_layer() -> None:
    """GPT-2 of 12 layers and 12 heads, 1,024 tokens on the 108 SMs of A100: 9 buffers, 8 of 1,024 x 768 x 4
    bytes more than one."""
    made = []
    for attention in ("flash2", "flash2-deterministic"):
        training = {"sequence_length": 1024, "attention": attention}
        job = resolve(Experiment(model="gpt2", cluster="dgx-a100-80gb", gpus=8, training=training))
        changes = make_plan(job).memory
        made.append(sum(one.bytes for one in changes if one.category == "activations" and one.bytes > 0))
    assert made[1] - made[0] == 12 * 8 * 1024 * 768 * 4


def test_fused_attention_that_sees_all_tokens_does_twice_the_work_of_a_causal_one() -> None:
    causal, full = (module(is_causal=one).kernels(FORWARD, SHAPE, FLASH) for one in (True, False))
    assert total_flops(full) == 2 * total_flops(causal)
    assert [kernel.is_causal for kernel in (*causal, *full)] == [True, False]
    assert not module(is_causal=False).kernels(BACKWARD, SHAPE, FLASH)[0].is_causal


def test_written_out_attention_multiplies_all_scores_whatever_the_mask() -> None:
    works = [
        total_flops(module(**one).kernels(FORWARD, SHAPE, MATH)) for one in ({}, {"chunk": 16}, {"window": 4})
    ]
    assert len(set(works)) == 1


def test_a_cap_on_scores_is_three_operators_and_keeps_tanh() -> None:
    """6 e and 7 e bytes per score; e kept; nothing in the fused kernel."""
    assert more(MATH, softcaps=True) == (12 * SCORES, 14 * SCORES, 2 * SCORES)
    assert more(FLASH, softcaps=True) == (0, 0, 0)


def test_sinks_are_a_column_that_is_joined_and_cut_off() -> None:
    """5 e and 11 e bytes per score, as counted on gpt-oss; nothing kept; nothing in the fused kernel."""
    assert more(MATH, has_sinks=True, upcasts_softmax=False) == (10 * SCORES, 22 * SCORES, 0)
    assert more(FLASH, has_sinks=True) == (0, 0, 0)


def test_a_learned_bias_is_read_and_its_gradient_summed_over_the_batch() -> None:
    """Fused: read once forward (e), read and its gradient written backward (2 e); the sum reads e and adds to
    what later layers gave, 3 e of one sequence's scores. Math: one more add, 2 e; the sum."""
    assert more(FLASH, bias="read") == (2 * SCORES, (4 + 2 + 3) * SCORES, 0)
    assert more(MATH, bias="read") == (4 * SCORES, (2 + 3) * SCORES, 0)


def test_the_layer_that_makes_the_bias_keeps_it_for_all() -> None:
    """4 heads of 64 x 64 in bf16; 15 operators on 8-byte integers, a gather and a transpose of 4 heads."""
    forward, _, kept = more(FLASH, bias="made")
    assert kept == 4 * 64 * 64 * 2
    assert forward == 2 * SCORES + 64 * 64 * (15 * 16 + 4 * 4 * 2)


def test_a_core_that_reads_an_earlier_layers_keys_keeps_none_itself() -> None:
    """128 tokens with 4 heads of 16 in bf16: q is 16,384 bytes, keys and values 32,768 more, which the layer
    that rotated them keeps. FlashAttention keeps log-sum-exp beside them, 4 bytes per token and head."""
    plain, reused = module(), module(reads_keys=True)
    works = [one.op_spec for one in (plain, reused) if isinstance(one.op_spec, Attention)]
    assert [work.kept_key_value_elements for work in works] == [4 * (16 + 16), 0]
    assert [one.saved_bytes(SHAPE, FLASH) for one in (plain, reused)] == [49_152 + 2048, 16_384 + 2048]
    kept = [one.op_spec.selective_bytes(one, SHAPE, FLASH) for one in (plain, reused)]
    assert kept == [49_152, 16_384]


def test_a_bias_of_zeros_is_read_too_but_has_no_gradient() -> None:
    """T5's cross-attention makes one; SDPA gets it as its mask."""
    assert more(FLASH, bias="zeros")[:2] == (2 * SCORES, 2 * SCORES)


def test_a_partly_rotated_head_is_put_together_again() -> None:
    """Half of a head: 10 passes over half and 2 over the whole, against 10; transformers' code moves 7.2."""
    whole, half = (moved(module(rotary=True, rotary_width=one), FLASH)[0] for one in (None, 8))
    rotated = TOKENS * 8 * 16 * 2
    assert whole - moved(module(), FLASH)[0] == 10 * rotated
    assert half - moved(module(), FLASH)[0] == 7 * rotated


def test_latent_attention_rotates_one_key_for_all_heads_and_keeps_keys_beside_values() -> None:
    """4 heads of 8 + 8: 10 passes over 8 of 4 + 1 heads, 2 over 8 heads of 16. v is a slice of a product
    whose other 8 features per head stay with it."""
    latent = module(rotary=True, rotary_width=8, is_latent=True)
    plain = moved(module(), FLASH)[0]
    assert moved(latent, FLASH)[0] - plain == TOKENS * 2 * (10 * 5 * 8 + 2 * 8 * 16)
    assert latent.saved_bytes(SHAPE, FLASH) - module().saved_bytes(SHAPE, FLASH) == TOKENS * 4 * 8 * 2
    fused = WorkOptions(compile=True)
    assert latent.saved_bytes(SHAPE, fused) == module().saved_bytes(SHAPE, fused)


@pytest.mark.parametrize(
    ("kind", "forward", "backward", "kept"),
    [("cohere_layer", 60, 144, 12), ("l2", 32, 80, 4), ("t5_rms", 34, 90, 8), ("gemma_rms", 40, 104, 8)],
)
def test_norms_written_in_python_move_what_was_counted(
    kind: str, forward: int, backward: int, kept: int
) -> None:
    """Bytes per element in bf16, counted with a dispatch mode over transformers' classes."""
    norm = Module("norm", Norm(32, kind))
    assert moved(norm, FLASH) == (forward * TOKENS * 32, backward * TOKENS * 32)
    assert norm.saved_bytes(SHAPE, FLASH) == kept * TOKENS * 32


def test_a_branch_multiplied_by_a_number_is_read_and_written_once_more() -> None:
    plain, scaled = (moved(Module("add", Residual(32, scales=one)), FLASH) for one in (False, True))
    assert [b - a for a, b in zip(plain, scaled, strict=True)] == [4 * TOKENS * 32] * 2
    compiled = WorkOptions(compile=True)
    assert moved(Module("add", Residual(32, scales=True)), compiled) == (0, 0)


def test_a_dropout_by_itself_keeps_a_byte_per_element() -> None:
    """Reads and writes 2 bytes each, and its mask of one; fused only the mask."""
    drop = Module("drop", Activation(32, False, "dropout"))
    assert moved(drop, FLASH) == (5 * TOKENS * 32, 5 * TOKENS * 32)
    assert moved(drop, WorkOptions(compile=True)) == (TOKENS * 32, TOKENS * 32)
    assert drop.saved_bytes(SHAPE, FLASH) == TOKENS * 32
    assert (
        Module("scale", Activation(32, False, "scale")).kernels(FORWARD, SHAPE, WorkOptions(compile=True))
        == ()
    )


@pytest.mark.parametrize(("mask", "casts"), [("scores", 0), ("bool", 1)])
def test_a_padding_mask_makes_fused_attention_compute_all_pairs_with_all_heads(mask: Any, casts: int) -> None:
    """2 sequences of 64 tokens, 4 heads of 16 with 2 of keys and values, in bf16. Forward: 2 products of 2 x
    4 x 64^2 scores over 16 features, 2 FLOPs each, are 2,097,152, of which causal attention has half. The
    mask has 2 x 64^2 scores of 2 bytes, 16,384, and keys and values of all heads are read: 128 tokens of 4
    x 64 elements, and 4 log-sum-exps of 4 bytes. They are copied from 2 heads to 4 (128 x 192 elements)."""
    grouped, options = module(num_kv_heads=2), WorkOptions(padding_mask=mask)
    forward, backward = (grouped.kernels(in_pass, SHAPE, options) for in_pass in (FORWARD, BACKWARD))
    assert total_flops(forward) == 2_097_152 == 2 * total_flops(grouped.kernels(FORWARD, SHAPE, FLASH))
    assert total_flops(backward) == 5_242_880
    assert [kernel.hbm_bytes for kernel in forward] == [
        128 * 192 * 2,
        *[2 * 64 * 64 * 3] * casts,
        128 * (256 * 2 + 16) + 16_384,
    ]
    assert not forward[-1].is_causal
    tower = module(is_causal=False)
    assert tower.kernels(FORWARD, SHAPE, options) == tower.kernels(FORWARD, SHAPE, FLASH)
    kept = 128 * (192 * 2 + 16)
    assert grouped.saved_bytes(SHAPE, options) == kept + 16_384 * casts


def test_a_mask_is_read_by_every_pass_of_an_ungrouped_core_without_copies() -> None:
    """Heads of keys and values are there already. Backward reads the mask once more."""
    one, options = module(), WorkOptions(padding_mask="scores")
    for in_pass in (FORWARD, BACKWARD):
        (kernel,), (plain,) = one.kernels(in_pass, SHAPE, options), one.kernels(in_pass, SHAPE, FLASH)
        assert kernel.hbm_bytes - plain.hbm_bytes == 16_384
        assert kernel.flops == 2 * plain.flops
