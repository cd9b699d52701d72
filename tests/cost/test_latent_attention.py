"""Multi-head latent attention, whose keys are wider than its values: 128 heads of 192 and 128, as DeepSeek
V3's, of which 64 features of a query and of the one key of all heads are rotated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations import FORWARD
from zsim.operations.attention.rotary import rotary_backward, rotary_forward
from zsim.specs.model.huggingface import load_model
from zsim.specs.model.spec import Attention, Module

HEADS, KEYS, VALUES, ROTATED = 128, 192, 128, 64
CORE = Attention(HEADS, HEADS, KEYS, VALUES, rotary_width=ROTATED, is_latent=True)
SHAPE = BatchShape(2, 64)
TOKENS, PAIRS = 128, 2 * HEADS * 64 * 64
FLASH, MATH = WorkOptions(), WorkOptions(attention="math")


def module(work: Attention = CORE) -> Module:
    return Module("core", work)


def test_the_preset_is_of_these_shapes() -> None:
    modules = [one for block in load_model("deepseek-v3").unique_blocks for one in block.modules]
    works = [one.op_spec for one in modules if isinstance(one.op_spec, Attention)]
    shapes = {(w.num_heads, w.num_kv_heads, w.qk_head_dim, w.v_head_dim, w.rotary_width) for w in works}
    assert shapes == {(HEADS, HEADS, KEYS, VALUES, ROTATED)}
    assert all(work.is_latent for work in works)


def test_keys_and_values_are_counted_by_their_own_widths() -> None:
    assert CORE.query_elements == 128 * 192
    assert CORE.key_value_elements == 128 * 192 + 128 * 128
    assert CORE.input_elements == 128 * (192 + 192 + 128)
    assert CORE.output_elements == 128 * 128


def test_fewer_heads_of_keys_are_fewer_of_values() -> None:
    few = replace(CORE, num_kv_heads=8)
    assert few.key_value_elements == 8 * (192 + 128)
    assert few.output_elements == 128 * 128


def test_flash_keeps_queries_keys_and_values_and_a_sum_for_each_head() -> None:
    """2 bytes each; 4 for a log-sum-exp. Eager code keeps the 128 features of keys that have no position
    beside the values, of whose projection they are a part; a fused kernel does not."""
    whole = 2 * 128 * (192 + 192 + 128) + 4 * 128
    fused = replace(FLASH, compile=True)
    assert module().saved_bytes(SHAPE, FLASH) == TOKENS * (whole + 2 * 128 * (192 - 64))
    assert fused.fuses_kernels
    assert module().saved_bytes(SHAPE, fused) == TOKENS * whole


def test_written_out_attention_keeps_queries_keys_and_values_of_all_heads_and_its_scores() -> None:
    """64 features less of values are one tensor less of them, of keys two: q and k."""
    plain = module().saved_bytes(SHAPE, MATH)
    narrow = module(replace(CORE, v_head_dim=64)).saved_bytes(SHAPE, MATH)
    assert plain - narrow == TOKENS * 2 * 128 * 64
    less = module(replace(CORE, qk_head_dim=128)).saved_bytes(SHAPE, MATH)
    assert plain - less == TOKENS * 2 * 128 * 2 * 64


def test_scores_have_the_width_of_keys_and_outputs_that_of_values() -> None:
    """Half of 64^2 pairs of a causal sequence: 2 FLOPs for each of 192 and of 128 features."""
    forward = sum(kernel.flops for kernel in module().kernels(FORWARD, SHAPE, FLASH))
    assert forward == PAIRS / 2 * 2 * (192 + 128)


def test_one_key_is_rotated_for_all_heads() -> None:
    """10 passes over the 64 rotated features of 128 queries and one key, and 2 over whole heads, to put them
    together; backward 15 and 8.4. Without latent keys all 128 are rotated."""
    eager = [rotary_forward(CORE, SHAPE, FLASH), rotary_backward(CORE, SHAPE, FLASH)]
    forward, backward = (sum(kernel.hbm_bytes for kernel in kernels) for kernels in eager)
    assert forward == pytest.approx(TOKENS * 2 * (10 * 129 * 64 + 2 * 256 * 192))
    assert backward == pytest.approx(TOKENS * 2 * (15 * 129 * 64 + 8.4 * 256 * 192))
    each = replace(CORE, is_latent=False)
    with_keys = sum(kernel.hbm_bytes for kernel in rotary_forward(each, SHAPE, FLASH))
    assert with_keys == pytest.approx(TOKENS * 2 * (10 * 256 * 64 + 2 * 256 * 192))
