"""Modules become kernels whose FLOPs and bytes can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zsim.cost.kernels.kernel import Kernel, total_flops
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.cost.kernels.update import (
    accumulate_kernels,
    cast_kernels,
    copy_kernels,
    fill_kernels,
    norm_kernels,
    optimizer_kernels,
    optimizer_state_bytes,
    scale_kernels,
)
from zsim.errors import NotSimulatedError
from zsim.operations import BACKWARD, FORWARD
from zsim.specs.model.huggingface import load_model
from zsim.specs.model.spec import (
    Activation,
    Attention,
    Embedding,
    Linear,
    Loss,
    Module,
    Norm,
    Parameter,
    Residual,
)
from zsim.specs.strategy.training import layer_kernel_sets, losses

SHAPE = BatchShape(sequences=2, sequence_length=100)  # 200 tokens
EAGER = WorkOptions()
FUSED = WorkOptions(compile=True, loss=losses()["fused"])
LIGER = WorkOptions(liger=True, loss=losses()["fused_linear"])


def weight(*shape: int) -> tuple[Parameter, ...]:
    return (Parameter("weight", shape),)


def linear(*, bias: bool = False, shares_input: bool = False) -> Module:
    parameters = (*weight(30, 10), *((Parameter("bias", (30,)),) if bias else ()))
    return Module("m", Linear(10, 30), parameters, shares_input)


def total_bytes(kernels: tuple[Kernel, ...]) -> float:
    return sum(kernel.hbm_bytes for kernel in kernels)


def total_launches(kernels: tuple[Kernel, ...]) -> int:
    return sum(kernel.launches for kernel in kernels)


def test_a_linear_is_one_product_forward_and_two_backward() -> None:
    """200 x 10 by 10 x 30: 120,000 FLOPs, (2000 + 300 + 6000) * 2 bytes; backward the same twice."""
    forward, backward = linear().kernels(FORWARD, SHAPE, EAGER), linear().kernels(BACKWARD, SHAPE, EAGER)
    assert forward == (Kernel("gemm", 120_000.0, 16_600.0, "bf16", (200, 30, 10)),)
    assert backward == (
        Kernel("gemm", 120_000.0, 16_600.0, "bf16", (200, 10, 30), layout="nn"),
        Kernel("gemm", 120_000.0, 16_600.0, "bf16", (30, 10, 200), layout="tn"),
    )


def test_a_bias_adds_a_sum_over_tokens_and_a_shared_input_an_add() -> None:
    """Bias: reads 6000 gradients, writes 30; shared input: reads two and writes one of 2000 elements."""
    bias = linear(bias=True).kernels(BACKWARD, SHAPE, EAGER)
    shared = linear(shares_input=True).kernels(BACKWARD, SHAPE, EAGER)
    assert bias[2:] == (Kernel("elementwise", 0.0, 12_060.0),)
    assert shared[2:] == (Kernel("elementwise", 0.0, 12_000.0),)
    assert total_launches(linear(bias=True).kernels(FORWARD, SHAPE, EAGER)) == 1


def test_fp32_moves_twice_the_bytes() -> None:
    """Four bytes per element, and the products run in fp32."""
    (kernel,) = linear().kernels(FORWARD, SHAPE, WorkOptions("fp32"))
    assert (kernel.hbm_bytes, kernel.dtype) == (33_200.0, "fp32")


def test_fp8_casts_both_operands_and_leaves_the_head_alone() -> None:
    """x of 200 * 32 and w of 32 * 48 elements: 5 bytes each; the product reads 1-byte operands, writes 2-byte
    results. Backward casts the gradient, the weight and the input again."""
    module = Module("m", Linear(32, 48), weight(48, 32))
    options = WorkOptions("fp8")
    forward = module.kernels(FORWARD, SHAPE, options)
    assert [kernel.hbm_bytes for kernel in forward] == [
        5.0 * 200 * 32,
        5.0 * 32 * 48,
        200 * 32 + 32 * 48 + 2.0 * 200 * 48,
    ]
    assert [kernel.dtype for kernel in forward] == ["bf16", "bf16", "fp8"]
    assert [kernel.dtype for kernel in module.kernels(BACKWARD, SHAPE, options)][-2:] == ["fp8", "fp8"]
    head = Module("lm_head", Linear(32, 48), weight(48, 32))
    assert head.kernels(FORWARD, SHAPE, options) == head.kernels(FORWARD, SHAPE, EAGER)
    odd = linear()
    assert odd.kernels(FORWARD, SHAPE, options) == odd.kernels(FORWARD, SHAPE, EAGER)


def test_a_tied_head_adds_its_gradient_to_the_embeddings() -> None:
    """Reads two and writes one of 300 elements beyond the two products."""
    tied = Module("lm_head", Linear(10, 30))
    assert tied.kernels(BACKWARD, SHAPE, EAGER)[2:] == (Kernel("elementwise", 0.0, 1800.0),)


def test_flash_attention_skips_the_masked_half() -> None:
    """2 sequences, 4 heads of 8, s = 100: full 2 * 2 * 4 * 100^2 * 16 FLOPs, causal half of it; backward 2.5
    times. Forward moves q (32), k and v (2 of 4 heads: 32), output (32) and log-sum-exp."""
    module = Module("core", Attention(4, 2, 8, 8, rotary=False))
    (forward,) = module.kernels(FORWARD, SHAPE, EAGER)
    (backward,) = module.kernels(BACKWARD, SHAPE, EAGER)
    assert forward.kind == "attention_forward"
    assert forward.shape == (8, 100, 100, 8)
    assert forward.flops == 2 * 2 * 4 * 100**2 * 16 / 2
    assert forward.hbm_bytes == 200 * (96 * 2 + 4 * 4)
    assert backward.kind == "attention_backward"
    assert backward.flops == 2.5 * forward.flops


def test_a_window_leaves_fewer_pairs() -> None:
    """s = 100, w = 20: 20 * 100 - 200 = 1800 pairs instead of 5000; a window beyond s changes nothing."""
    whole = Module("core", Attention(4, 4, 8, 8, rotary=False)).kernels(FORWARD, SHAPE, EAGER)
    narrow = Attention(4, 4, 8, 8, rotary=False, window=20)
    wide = Attention(4, 4, 8, 8, rotary=False, window=200)
    assert total_flops(Module("core", narrow).kernels(FORWARD, SHAPE, EAGER)) == total_flops(whole) * 0.36
    assert Module("core", wide).kernels(FORWARD, SHAPE, EAGER) == whole


def test_written_out_attention_computes_every_pair() -> None:
    """Two products of 2 * 2 * 4 * 100^2 * 8 FLOPs forward, four backward, and the scores go through HBM."""
    module = Module("core", Attention(4, 4, 8, 8, rotary=False))
    options = WorkOptions("bf16", "math")
    product = 2 * 2 * 4 * 100**2 * 8
    assert total_flops(module.kernels(FORWARD, SHAPE, options)) == 2 * product
    assert total_flops(module.kernels(BACKWARD, SHAPE, options)) == 4 * product
    softmax = next(k for k in module.kernels(FORWARD, SHAPE, options) if k.kind == "elementwise")
    # scale 4, mask 4, softmax to fp32 6, cast back 6 bytes for each of 80,000 scores
    assert (softmax.hbm_bytes, softmax.launches) == (20 * 80_000, 4)


def test_rotary_is_many_kernels_in_eager_and_one_when_fused() -> None:
    """200 tokens, 4 + 2 heads of 8: 9600 elements, 10 passes of 2 bytes forward, 15 backward."""
    module = Module("core", Attention(4, 2, 8, 8))
    forward, backward = module.kernels(FORWARD, SHAPE, EAGER), module.kernels(BACKWARD, SHAPE, EAGER)
    assert (forward[0].hbm_bytes, forward[0].launches) == (10 * 9600 * 2, 10)
    assert (backward[-1].hbm_bytes, backward[-1].launches) == (15 * 9600 * 2, 18)
    assert module.kernels(FORWARD, SHAPE, FUSED)[0] == Kernel("elementwise", 0.0, 2 * 9600 * 2.0)


@pytest.mark.parametrize(
    ("kind", "options", "forward", "backward"),
    [
        ("rms", EAGER, (36, 8), (92, 16)),
        ("gemma_rms", EAGER, (40, 10), (104, 17)),
        ("layer", EAGER, (6, 1), (14, 2)),
        ("rms", WorkOptions("fp32"), (28, 6), (92, 14)),
        ("rms", FUSED, (8, 1), (12, 2)),
    ],
)
def test_norms_move_the_bytes_of_their_operators(
    kind: str, options: WorkOptions, forward: tuple[int, int], backward: tuple[int, int]
) -> None:
    """(bytes per element, launches), counted from the operators that transformers dispatches. LayerNorm reads
    its input twice and writes, 3 x 2; backward dy and x twice, writes, and both once more, 7 x 2."""
    module = Module("norm", Norm(10, kind), weight(10))
    for kernels, (per_element, launches) in (
        (module.kernels(FORWARD, SHAPE, options), forward),
        (module.kernels(BACKWARD, SHAPE, options), backward),
    ):
        assert (total_bytes(kernels), total_launches(kernels)) == (per_element * 2000, launches)


@pytest.mark.parametrize(
    ("name", "gated", "options", "forward", "backward"),
    [
        ("silu", True, EAGER, (5, 2), (9, 3)),
        ("silu", True, FUSED, (3, 1), (5, 1)),
        ("gelu", False, EAGER, (2, 1), (3, 1)),
        ("gelu_new", False, EAGER, (18, 8), (28, 11)),
        ("gelu_new", False, FUSED, (2, 1), (3, 1)),
    ],
)
def test_activations_move_the_tensors_of_their_operators(
    name: str, gated: bool, options: WorkOptions, forward: tuple[int, int], backward: tuple[int, int]
) -> None:
    """(tensors of 2 bytes per element, launches)."""
    module = Module("act", Activation(10, gated, name))
    for kernels, (tensors, launches) in (
        (module.kernels(FORWARD, SHAPE, options), forward),
        (module.kernels(BACKWARD, SHAPE, options), backward),
    ):
        assert (total_bytes(kernels), total_launches(kernels)) == (tensors * 2000 * 2, launches)


def test_residuals_add_and_drop_out() -> None:
    """An add reads two and writes one; dropout reads and writes one and writes a byte of mask; compiled, the
    next norm adds."""
    plain, dropped = Module("r", Residual(10)), Module("r", Residual(10, 0.1))
    assert total_bytes(plain.kernels(FORWARD, SHAPE, EAGER)) == 6 * 2000
    assert total_bytes(dropped.kernels(FORWARD, SHAPE, EAGER)) == 11 * 2000
    assert plain.kernels(FORWARD, SHAPE, FUSED) == ()


def test_an_embedding_gathers_rows_and_zeroes_the_whole_gradient() -> None:
    """200 rows of 10: read and written, and 8-byte indices; backward writes all 1000 rows first."""
    module = Module("embed", Embedding(1000, 10), weight(1000, 10))
    (forward,) = module.kernels(FORWARD, SHAPE, EAGER)
    (backward,) = module.kernels(BACKWARD, SHAPE, EAGER)
    assert (forward.kind, forward.hbm_bytes) == ("embedding", 200 * (2 * 10 * 2 + 8))
    assert backward.hbm_bytes == 1000 * 10 * 2 + 200 * (3 * 10 * 2 + 32)


def test_the_loss_upcasts_in_eager_and_reads_twice_when_fused() -> None:
    """20,000 logits: cast 6, log-softmax 8 bytes; backward fill 4, log-softmax 12, cast 6. Fused 4 and 4."""
    module = Module("loss", Loss(100))
    assert total_bytes(module.kernels(FORWARD, SHAPE, EAGER)) == 14 * 20_000
    assert total_bytes(module.kernels(BACKWARD, SHAPE, EAGER)) == 22 * 20_000
    assert total_bytes(module.kernels(FORWARD, SHAPE, FUSED)) == 4 * 20_000
    assert total_bytes(module.kernels(BACKWARD, SHAPE, FUSED)) == 4 * 20_000
    assert total_bytes(module.kernels(FORWARD, SHAPE, WorkOptions("fp32"))) == 8 * 20_000


def test_log_softmax_reads_long_rows_thrice_forward_and_the_gradient_twice_backward() -> None:
    """200 rows of 50,257 logits: cast 6, read 3 x 4, write 4; backward fill 4, read 4 + 8, write 4, cast 6.
    A hundred stay in a cache (the test before)."""
    module = Module("loss", Loss(50_257))
    assert total_bytes(module.kernels(FORWARD, SHAPE, EAGER)) == 22 * 200 * 50_257
    assert total_bytes(module.kernels(BACKWARD, SHAPE, EAGER)) == 26 * 200 * 50_257
    assert total_bytes(module.kernels(FORWARD, SHAPE, FUSED)) == 4 * 200 * 50_257


def test_autocast_leaves_log_softmax_in_the_logits_type_and_casts_what_it_puts_out() -> None:
    """20,000 logits: log-softmax 4, cast 6; backward fill 4, cast 6, log-softmax 6. Rows of 65,536 in 2 bytes
    overflow the caches, 4 more forward and 2 backward; of 49,152 by half. Kept: both types of
    log-probabilities, 6."""
    options, rows = WorkOptions(loss=losses()["autocast"]), BatchShape(1, 1)
    assert total_bytes(Module("loss", Loss(100)).kernels(FORWARD, SHAPE, options)) == 10 * 20_000
    assert total_bytes(Module("loss", Loss(100)).kernels(BACKWARD, SHAPE, options)) == 16 * 20_000
    long, between = Module("loss", Loss(65_536)), Module("loss", Loss(49_152))
    assert total_bytes(long.kernels(FORWARD, rows, options)) == 14 * 65_536
    assert total_bytes(long.kernels(BACKWARD, rows, options)) == 18 * 65_536
    assert total_bytes(between.kernels(FORWARD, rows, options)) == 12 * 49_152
    assert Module("loss", Loss(100)).saved_bytes(SHAPE, options) == 6 * 20_000


def test_a_loss_in_16_bits_casts_nothing() -> None:
    """20,000 logits: log-softmax 4; backward fill 2, log-softmax 6. Kept: its output, 2."""
    module, options = Module("loss", Loss(100)), WorkOptions(loss=losses()["eager-16-bit"])
    assert total_bytes(module.kernels(FORWARD, SHAPE, options)) == 4 * 20_000
    assert total_bytes(module.kernels(BACKWARD, SHAPE, options)) == 8 * 20_000
    assert module.saved_bytes(SHAPE, options) == 2 * 20_000


def test_one_warp_picks_the_labels_of_the_eager_loss_two_loads_for_32_of_them() -> None:
    """200 tokens are 7 rounds of 32; backward and the fused loss wait for none."""
    module = Module("loss", Loss(50_257))
    assert [kernel.dependent_loads for kernel in module.kernels(FORWARD, SHAPE, EAGER)] == [14]
    assert [kernel.dependent_loads for kernel in module.kernels(BACKWARD, SHAPE, EAGER)] == [0]
    assert [kernel.dependent_loads for kernel in module.kernels(FORWARD, SHAPE, FUSED)] == [0]


def test_megatrons_loss_makes_seven_passes_in_fp32() -> None:
    """20,000 logits: cast 6, maximum 4, subtract 8, exp 8, sum 4, divide 8; backward scale 8, cast 6."""
    module, options = Module("loss", Loss(100)), WorkOptions(loss=losses()["megatron"])
    assert total_bytes(module.kernels(FORWARD, SHAPE, options)) == 38 * 20_000
    assert total_bytes(module.kernels(BACKWARD, SHAPE, options)) == 14 * 20_000


def test_unsloths_loss_reads_once_between_transformers_copies() -> None:
    """20,000 logits: cast 6, copy 8, read 4; backward in place 8, zeros 4, copy 8, cast 6."""
    module, options = Module("loss", Loss(100)), WorkOptions(loss=losses()["unsloth"])
    assert total_bytes(module.kernels(FORWARD, SHAPE, options)) == 18 * 20_000
    assert total_bytes(module.kernels(BACKWARD, SHAPE, options)) == 26 * 20_000


def test_torchs_own_rms_norm_is_a_layer_norms_kernel() -> None:
    """200 tokens of 10 in bf16 under torchtitan's layers: 3 x 2 bytes in one launch and 7 x 2 in two, 2 kept;
    a frozen one has no gradient of the weight, 2 x 2 bytes less. Compiled it is the compiler's, and norms of
    other kinds stay as they are."""
    titan = WorkOptions(layers=layer_kernel_sets()["torchtitan"])
    norm = Module("norm", Norm(10, "rms"), weight(10))
    forward, backward = norm.kernels(FORWARD, SHAPE, titan), norm.kernels(BACKWARD, SHAPE, titan)
    assert (total_bytes(forward), total_launches(forward)) == (6 * 2000, 1)
    assert (total_bytes(backward), total_launches(backward)) == (14 * 2000, 2)
    assert norm.op_spec.kept_bytes(norm, SHAPE, titan) == 2 * 2000
    frozen = Module("norm", Norm(10, "rms"), (Parameter("weight", (10,), trainable=False),))
    assert total_bytes(frozen.kernels(BACKWARD, SHAPE, titan)) == 10 * 2000
    compiled = replace(titan, compile=True)
    assert norm.kernels(FORWARD, SHAPE, compiled) == norm.kernels(FORWARD, SHAPE, FUSED)
    gemma = Module("norm", Norm(10, "gemma_rms"), weight(10))
    assert gemma.kernels(FORWARD, SHAPE, titan) == gemma.kernels(FORWARD, SHAPE, EAGER)


def test_ligers_norm_leaves_the_residual_add_alone() -> None:
    """200 tokens of 10 in bf16: a norm reads and writes 2 x 2 bytes forward, 3 x 2 backward; torch.compile's
    takes the add along, 4 x 2, and leaves none."""
    norm, add = Module("norm", Norm(10, "rms")), Module("residual", Residual(10))
    assert total_bytes(norm.kernels(FORWARD, SHAPE, LIGER)) == 4 * 2000
    assert total_bytes(norm.kernels(BACKWARD, SHAPE, LIGER)) == 6 * 2000
    assert total_bytes(add.kernels(FORWARD, SHAPE, LIGER)) == 6 * 2000
    assert total_bytes(norm.kernels(FORWARD, SHAPE, FUSED)) == 8 * 2000
    assert total_bytes(add.kernels(FORWARD, SHAPE, FUSED)) == 0


def test_fused_adamw_moves_28_bytes_per_parameter() -> None:
    """Parameter and two moments read and written, gradient read, all fp32; bf16 gradients save 2."""
    (update,) = optimizer_kernels(1000)
    assert (update.kind, update.hbm_bytes, update.launches) == ("optimizer", 28_000.0, 1)
    assert optimizer_kernels(1000, gradient_dtype="bf16")[0].hbm_bytes == 26_000.0


def test_a_low_precision_copy_is_cast_after_the_update() -> None:
    """Reads fp32, writes bf16."""
    update, cast = optimizer_kernels(1000, low_precision_copy=True)
    assert update == optimizer_kernels(1000)[0]
    assert (cast.kind, cast.hbm_bytes) == ("copy", 6000.0)


def test_foreach_adamw_makes_a_pass_per_operation() -> None:
    """18 passes over states and 3 over the gradient of 4 bytes: 84 bytes, 8 launches per 21M elements."""
    (update,) = optimizer_kernels(1000, implementation="foreach")
    assert (update.hbm_bytes, update.launches) == (84_000.0, 8)
    (loop,) = optimizer_kernels(1000, implementation="for_loop", num_tensors=5)
    assert loop.launches == 40


def test_sgd_with_momentum_reads_and_writes_one_state() -> None:
    """Fused: parameter and momentum read and written, gradient read: 20 bytes. foreach: mul buffer 2, add
    gradient 2 + 1, add to parameter 3 passes: 32 bytes, 3 launches."""
    (fused,) = optimizer_kernels(1000, "sgd_momentum")
    (foreach,) = optimizer_kernels(1000, "sgd_momentum", "foreach")
    assert (fused.hbm_bytes, fused.launches) == (20_000.0, 1)
    assert (foreach.hbm_bytes, foreach.launches) == (32_000.0, 3)


@pytest.mark.parametrize(("numel", "launches"), [(1, 1), (320 * 65536, 1), (320 * 65536 + 1, 2)])
def test_big_updates_take_more_launches(numel: int, launches: int) -> None:
    """320 chunks of 65,536 elements per launch."""
    assert optimizer_kernels(numel)[0].launches == launches


def test_optimizer_states_are_counted_without_the_master() -> None:
    """Adam keeps two fp32 moments, plain SGD nothing; an unknown optimizer is refused with the nearest."""
    assert optimizer_state_bytes("adamw") == 8
    assert optimizer_state_bytes("adamw", "bf16") == 4
    assert optimizer_state_bytes("sgd") == 0
    with pytest.raises(NotSimulatedError, match="did you mean 'adamw'"):
        optimizer_kernels(1000, "adamww")


def test_nothing_to_update_is_no_kernel() -> None:
    """A rank without elements launches nothing."""
    assert optimizer_kernels(0) == ()
    assert norm_kernels(0) == scale_kernels(0) == accumulate_kernels(0, "fp32", "bf16") == ()
    assert copy_kernels(0) == cast_kernels(0, "fp32", "bf16") == fill_kernels(0) == ()


def test_copies_read_and_write() -> None:
    """A copy moves twice its bytes; reading twice as much (an add in place) three times; a fill once."""
    assert copy_kernels(100)[0].hbm_bytes == 200.0
    assert copy_kernels(100, launches=3, read_factor=2.0)[0] == Kernel("copy", 0.0, 300.0, launches=3)
    assert fill_kernels(100)[0].hbm_bytes == 100.0
    assert cast_kernels(100, "bf16", "fp32")[0].hbm_bytes == 600.0
    assert accumulate_kernels(100, "fp32", "bf16")[0].hbm_bytes == 1000.0


def test_the_gradient_norm_reads_and_clipping_reads_and_writes() -> None:
    """1000 fp32 gradients of one tensor: 4000 bytes and its norm written and read; clipping 8000."""
    assert norm_kernels(1000)[0].hbm_bytes == 4008.0
    assert scale_kernels(1000)[0].hbm_bytes == 8000.0


@pytest.mark.parametrize(
    "name", ["llama-3-8b", "gpt2", "gptj-6b", "gpt-neo-2.7b", "gpt-neox-20b", "falcon-7b", "mpt-7b",
             "bloom-7b1", "opt-6.7b", "gemma2-9b", "phi3-mini", "qwen2-7b", "qwen3-8b", "mistral-7b"],
)  # fmt: skip
@pytest.mark.parametrize("attention", ["flash", "math"])
@pytest.mark.parametrize("compiled", [False, True])
def test_backward_products_are_twice_the_forward_ones(name: str, attention: Any, compiled: bool) -> None:
    """For every dense family; flash attention has its own factor of 2.5."""
    model, options = load_model(name), WorkOptions("bf16", attention, compiled)
    for module in (*model.before, *model.blocks[0].modules, *model.after):
        forward, backward = module.kernels(FORWARD, SHAPE, options), module.kernels(BACKWARD, SHAPE, options)
        is_flash = attention == "flash" and isinstance(module.op_spec, Attention)
        assert total_flops(backward) == (2.5 if is_flash else 2.0) * total_flops(forward)
        assert all(kernel.hbm_bytes > 0 and kernel.launches >= 1 for kernel in (*forward, *backward))


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt2", "mpt-7b"])
def test_compiling_never_moves_more_or_launches_more(name: str) -> None:
    """Per block, forward and backward."""
    block = load_model(name).blocks[0]
    for in_pass in (FORWARD, BACKWARD):
        eager = tuple(k for m in block.modules for k in m.kernels(in_pass, SHAPE, EAGER))
        fused = tuple(k for m in block.modules for k in m.kernels(in_pass, SHAPE, FUSED))
        assert total_bytes(fused) <= total_bytes(eager)
        assert total_launches(fused) <= total_launches(eager)


def test_kernels_are_hashable_and_the_same_every_time() -> None:
    """So that plans can price each distinct one once."""
    block = load_model("llama-3-8b").blocks[0]
    first = [module.kernels(FORWARD, SHAPE, EAGER) for module in block.modules]
    again = [module.kernels(FORWARD, SHAPE, EAGER) for module in block.modules]
    assert first == again
    assert len({kernel for kernels in first for kernel in kernels}) < sum(len(kernels) for kernels in first)


def test_a_padding_mask_costs_gathers_and_scatters_around_attention() -> None:
    """4 heads of 8: q, k, v are 96 elements a token, the output 32. Forward 2 x 96 + 3 x 32 = 288, backward
    3 x 96 + 2 x 32 = 352 elements of 2 bytes, 200 tokens; q, k and v go by an index."""
    plain = Module("core", Attention(4, 4, 8, 8, rotary=False))
    masked = Module("core", Attention(4, 4, 8, 8, rotary=False, unpads=True))
    for in_pass, elements in ((FORWARD, 288), (BACKWARD, 352)):
        extra = total_bytes(masked.kernels(in_pass, SHAPE, EAGER)) - total_bytes(
            plain.kernels(in_pass, SHAPE, EAGER)
        )
        assert extra == elements * 2 * 200
        indexed = [kernel.indexed_elements for kernel in masked.kernels(in_pass, SHAPE, EAGER)]
        assert sum(indexed) == 96 * 200
        math = WorkOptions(attention="math")
        assert masked.kernels(in_pass, SHAPE, math) == plain.kernels(in_pass, SHAPE, math)
