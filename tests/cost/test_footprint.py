"""Activation bytes, against the published formulas."""

from __future__ import annotations

from typing import Any

import pytest

from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.cost.memory import checkpoint_bytes, recomputed_modules, saves_only_block_input
from zsim.specs.model.huggingface import load_model, model_from_config
from zsim.specs.model.spec import Activation, Attention, Block, Loss, Module, Norm, Parameter
from zsim.specs.strategy.training import layer_kernel_sets, losses

SHAPE = BatchShape(sequences=2, sequence_length=2048)
TOKENS = 4096


def kept(block: Block, options: WorkOptions, checkpointing: Any = "none", hidden: int = 12288) -> int:
    if checkpointing == "full":
        return checkpoint_bytes(hidden, SHAPE, options)
    rule = Module.selective_bytes if checkpointing == "selective" else Module.saved_bytes
    return sum(rule(module, SHAPE, options) for module in block.modules)


def test_a_gpt3_block_keeps_what_korthikanti_says() -> None:
    """s b h (34 + 5 a s / h) with s b = 4096, h = 12288, a = 96, s = 2048: 34 + 80 = 114 bytes."""
    block = load_model("gpt-3-175b").blocks[0]
    assert kept(block, WorkOptions("bf16", "math", compile=True)) == TOKENS * 12288 * 114


def test_flash_attention_keeps_no_scores() -> None:
    """34 sbh, and 4 bytes of log-sum-exp for each of 96 heads."""
    block = load_model("gpt-3-175b").blocks[0]
    assert kept(block, WorkOptions("bf16", "flash", compile=True)) == TOKENS * (12288 * 34 + 96 * 4)


def test_selective_recomputation_drops_the_core_of_attention() -> None:
    """34 sbh, with written-out attention and with flash (Korthikanti et al. 2022, section 5)."""
    block = load_model("gpt-3-175b").blocks[0]
    for attention in ("math", "flash"):
        options = WorkOptions("bf16", attention, compile=True)
        assert kept(block, options, "selective") == TOKENS * 12288 * 34


def test_full_recomputation_keeps_the_blocks_input() -> None:
    """2 sbh."""
    block = load_model("gpt-3-175b").blocks[0]
    assert kept(block, WorkOptions(), "full") == TOKENS * 12288 * 2
    assert checkpoint_bytes(12288, SHAPE, WorkOptions("fp32")) == TOKENS * 12288 * 4


def test_gpt2s_activation_written_in_python_keeps_four_tensors() -> None:
    """Eager `NewGELUActivation` keeps x, x/2, tanh and 1 + tanh: 4 * 8h instead of 8h: 58, not 34."""
    block = load_model("gpt-3-175b").blocks[0]
    assert kept(block, WorkOptions("bf16", "flash")) == TOKENS * (12288 * 58 + 96 * 4)


def test_a_llama_block_keeps_what_its_operators_need() -> None:
    """Llama-3-8B, eager, per token: h = 4096, k and v 1024 each, f = 14336. Two norms of (4 + 2) h; inputs of
    q and of gate 2 * 2h; q, k, v 2 (h + 2 * 1024); log-sum-exp 4 * 32; input of o 2h; gate, silu(gate), up
    and their product 4 * 2f. 49,152 + 16,384 + 12,288 + 128 + 8,192 + 114,688 = 200,832.
    (autograd's own list of saved tensors has these and 8 bytes of norm statistics.)"""
    block = load_model("llama-3-8b").blocks[0]
    assert kept(block, WorkOptions("bf16", "flash")) == TOKENS * 200_832


def test_a_fused_llama_block_keeps_inputs_only() -> None:
    """As above with norms of 2h each and without silu(gate): 16,384 + 16,384 + 12,288 + 128 + 8,192 +
    3 * 2f = 86,016: 139,392."""
    block = load_model("llama-3-8b").blocks[0]
    assert kept(block, WorkOptions("bf16", "flash", compile=True)) == TOKENS * 139_392


def test_written_out_attention_repeats_keys_and_casts_probabilities() -> None:
    """Llama-3-8B: k and v of all 32 heads (4096 each) and, per head and score, 4 bytes of fp32 softmax and
    2 of its bf16 copy."""
    core = next(m for m in load_model("llama-3-8b").blocks[0].modules if isinstance(m.op_spec, Attention))
    options = WorkOptions("bf16", "math")
    assert core.saved_bytes(SHAPE, options) == TOKENS * 3 * 4096 * 2 + 2 * 32 * 2048**2 * 6
    assert core.selective_bytes(SHAPE, options) == TOKENS * (4096 + 2048) * 2


def test_a_slice_of_a_fused_projection_keeps_all_of_it_alive() -> None:
    """Phi 3: q, k (rotated, new) and the 3 * 3072 wide output that v is a slice of: 2 (2 + 3) 3072, and
    4 * 32 of log-sum-exp; Llama 2 with its own v: 2 * 3 * 4096 + 4 * 32."""
    phi = next(m for m in load_model("phi3-mini").blocks[0].modules if isinstance(m.op_spec, Attention))
    llama = next(m for m in load_model("llama-2-7b").blocks[0].modules if isinstance(m.op_spec, Attention))
    assert phi.saved_bytes(SHAPE, WorkOptions()) == TOKENS * (2 * 5 * 3072 + 128)
    assert llama.saved_bytes(SHAPE, WorkOptions()) == TOKENS * (2 * 3 * 4096 + 128)


def test_attention_between_gather_and_scatter_keeps_its_output_too() -> None:
    """4 heads of 8: q, k, v are 96 elements a token, the output 32, bf16. Kept beside q, k, v and 4 bytes of
    log-sum-exp a head: the output (64) and its index (8); passing in forward: q, k and v before
    the gather (192) and the output in fp32 (128), which is gone when the output is scattered (64)."""
    plain = Module("core", Attention(4, 4, 8, 8, rotary=False))
    masked = Module("core", Attention(4, 4, 8, 8, rotary=False, unpads=True))
    options = WorkOptions("bf16", "flash")
    assert plain.saved_bytes(SHAPE, options) == TOKENS * (192 + 16)
    assert masked.saved_bytes(SHAPE, options) == TOKENS * (192 + 16 + 64 + 8)
    assert masked.forward_extra_bytes(SHAPE, options) == TOKENS * (192 + 128)
    assert masked.backward_extra_bytes(SHAPE, options) == plain.backward_extra_bytes(SHAPE, options)


def test_only_fused_attention_is_gathered_for() -> None:
    plain = Module("core", Attention(4, 4, 8, 8, rotary=False))
    masked = Module("core", Attention(4, 4, 8, 8, rotary=False, unpads=True))
    options = WorkOptions("bf16", "math")
    for count in (Module.saved_bytes, Module.forward_extra_bytes, Module.backward_extra_bytes):
        assert count(masked, SHAPE, options) == count(plain, SHAPE, options)


def test_inputs_read_twice_are_kept_once() -> None:
    """k_proj and v_proj read what q_proj keeps."""
    modules = {module.name: module for module in load_model("llama-3-8b").blocks[0].modules}
    assert modules["self_attn.q_proj"].saved_bytes(SHAPE, WorkOptions()) == TOKENS * 2 * 4096
    assert modules["self_attn.k_proj"].saved_bytes(SHAPE, WorkOptions()) == 0
    assert modules["mlp.up_proj"].saved_bytes(SHAPE, WorkOptions()) == 0


def test_relu_keeps_nothing_beyond_the_next_products_input() -> None:
    """OPT: autograd keeps relu's output, which fc2 keeps as its input already."""
    modules = {module.name: module for module in load_model("opt-6.7b").blocks[0].modules}
    assert modules["activation_fn"].saved_bytes(SHAPE, WorkOptions()) == 0
    assert modules["fc2"].saved_bytes(SHAPE, WorkOptions()) == TOKENS * 4 * 4096 * 2


def test_dropout_keeps_a_byte_per_element_where_there_is_dropout() -> None:
    """GPT-2 drops at 0.1, Llama does not."""
    gpt2 = {module.name: module for module in load_model("gpt2").blocks[0].modules}
    llama = {module.name: module for module in load_model("llama-3-8b").blocks[0].modules}
    assert gpt2["attn.resid_dropout"].saved_bytes(SHAPE, WorkOptions()) == TOKENS * 768
    assert llama["mlp.residual"].saved_bytes(SHAPE, WorkOptions()) == 0


@pytest.mark.parametrize(
    ("options", "tensors"),
    [(WorkOptions(), (2, 3)), (WorkOptions(compile=True), (2, 3)), (WorkOptions(liger=True), (1, 1))],
)
def test_liger_writes_gradients_over_what_it_has(options: WorkOptions, tensors: tuple[int, int]) -> None:
    """dx over dy in its norm; those of gate and up over gate and up, where others make two more."""
    one = 4096 * 1000 * 2
    norm = Module("norm", Norm(1000, "layer"))
    gated = Module("act_fn", Activation(1000, gated=True))
    found = [module.backward_extra_bytes(SHAPE, options) for module in (norm, gated)]
    assert found == [count * one for count in tensors]


def test_the_loss_keeps_log_probabilities_and_a_fused_one_logits() -> None:
    """transformers: fp32 log-probabilities (4) stay; fp32 logits and their shifted copy pass in forward (8),
    two fp32 gradients in backward (8). One kernel each way keeps the bf16 logits. V = 128,256."""
    loss = load_model("llama-3-8b").after[-1]
    logits = TOKENS * 128_256
    assert loss.saved_bytes(SHAPE, WorkOptions()) == 4 * logits
    assert loss.forward_extra_bytes(SHAPE, WorkOptions()) == 8 * logits
    assert loss.backward_extra_bytes(SHAPE, WorkOptions()) == 8 * logits
    assert loss.saved_bytes(SHAPE, WorkOptions(loss=losses()["fused"])) == 2 * logits


def test_megatrons_loss_works_in_place() -> None:
    """Its fp32 softmax (4) stays and becomes the gradient; the 16-bit logits pass forward (2), the gradient's
    cast backward (2)."""
    loss = load_model("llama-3-8b").after[-1]
    logits, options = TOKENS * 128_256, WorkOptions(loss=losses()["megatron"])
    assert loss.saved_bytes(SHAPE, options) == 4 * logits
    assert loss.forward_extra_bytes(SHAPE, options) == 2 * logits
    assert loss.backward_extra_bytes(SHAPE, options) == 2 * logits


def test_ligers_loss_in_transformers_works_in_place_on_a_cast_copy() -> None:
    """`ForCausalLMLoss` casts the logits to fp32 (4), over which Liger writes their gradient: the 16-bit
    logits pass forward (2), the gradient's cast backward (2)."""
    loss = load_model("llama-3-8b").after[-1]
    logits, options = TOKENS * 128_256, WorkOptions(loss=losses()["liger"])
    assert loss.saved_bytes(SHAPE, options) == 4 * logits
    assert loss.forward_extra_bytes(SHAPE, options) == 2 * logits
    assert loss.backward_extra_bytes(SHAPE, options) == 2 * logits
    in_fp32 = WorkOptions("fp32", loss=losses()["liger"])
    assert loss.saved_bytes(SHAPE, in_fp32) + loss.forward_extra_bytes(SHAPE, in_fp32) == 4 * logits


def test_unsloths_loss_in_transformers_keeps_a_shifted_copy() -> None:
    """fp32 logits and their shifted copy forward, the copy as its gradient and its shift's backward: 8."""
    loss = load_model("llama-3-8b").after[-1]
    logits, options = TOKENS * 128_256, WorkOptions(loss=losses()["unsloth"])
    assert loss.saved_bytes(SHAPE, options) == 4 * logits
    assert loss.forward_extra_bytes(SHAPE, options) == 4 * logits
    assert loss.backward_extra_bytes(SHAPE, options) == 4 * logits


def test_liger_keeps_what_its_kernels_read() -> None:
    """An RMSNorm its input (2 bytes of an element of 4096), SwiGLU gate and up (2 x 14,336), eager 6 and 3 of
    them."""
    modules = {module.name: module for module in load_model("llama-3-8b").blocks[0].modules}
    norm, gate = modules["input_layernorm"], modules["mlp.act_fn"]
    eager, liger = WorkOptions(), WorkOptions(liger=True)
    assert [norm.saved_bytes(SHAPE, o) for o in (eager, liger)] == [6 * TOKENS * 4096, 2 * TOKENS * 4096]
    assert [gate.saved_bytes(SHAPE, o) for o in (eager, liger)] == [
        3 * 2 * TOKENS * 14_336, 2 * 2 * TOKENS * 14_336,
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt2", "falcon-7b", "gemma2-9b", "bloom-7b1"])
@pytest.mark.parametrize("attention", ["flash", "math"])
def test_bytes_grow_with_the_number_of_sequences(name: str, attention: Any) -> None:
    """Twice the sequences, twice everything."""
    model, options = load_model(name), WorkOptions("bf16", attention)
    one, two = BatchShape(1, 512), BatchShape(2, 512)
    for module in (*model.before, *model.blocks[0].modules, *model.after):
        for rule in (Module.saved_bytes, Module.forward_extra_bytes, Module.backward_extra_bytes):
            assert rule(module, two, options) == 2 * rule(module, one, options)


def names(modules: tuple[Module, ...]) -> list[str]:
    return [module.name for module in modules]


def test_recomputation_stops_before_a_product_that_nothing_needs() -> None:
    """torch's non-reentrant checkpoint: Llama's down_proj keeps its input, so its output is not computed
    again; GPT-2's dropout needs c_proj's output for its mask."""
    llama, gpt2 = load_model("llama-3-8b").blocks[0], load_model("gpt2").blocks[0]
    assert names(recomputed_modules(llama))[-1] == "mlp.act_fn"
    assert names(recomputed_modules(gpt2))[-2:] == ["mlp.c_proj", "mlp.dropout"]
    assert recomputed_modules(llama, stops_early=False) == llama.modules


def test_autocast_has_norms_residuals_and_embeddings_in_fp32() -> None:
    """A norm's output, and two gradients in its backward; a product's own are in the low type, with that of
    its weight. The first norm keeps the block's input as it is; a first product would keep a cast copy."""
    gpt2, cast = load_model("gpt2"), WorkOptions(autocast=True)
    modules = {module.name: module for module in (*gpt2.before, *gpt2.blocks[0].modules)}
    stream = TOKENS * 768 * 4
    for name in ("ln_1", "mlp.dropout", "transformer.wte"):
        assert modules[name].forward_extra_bytes(SHAPE, cast) == stream
    assert modules["ln_1"].backward_extra_bytes(SHAPE, cast) == 2 * stream
    projection = modules["attn.c_proj"].backward_extra_bytes(SHAPE, cast)
    assert projection == 2 * (2 * TOKENS * 768 + 768**2)
    kept = [saves_only_block_input(modules[name], cast) for name in ("ln_1", "attn.c_proj")]
    assert kept == [True, False]
    assert saves_only_block_input(modules["attn.c_proj"], WorkOptions())


def test_a_loss_whose_logits_are_held_keeps_them_once() -> None:
    """The fused one reads the trainer's; a copy in fp32 is another tensor."""
    fused = WorkOptions(loss=losses()["fused"])
    sizes = [
        Module("loss", Loss(100, holds_logits=held)).saved_bytes(SHAPE, fused)
        for held in ("no", "as they are", "in fp32")
    ]
    assert sizes == [200 * TOKENS, 0, 200 * TOKENS]


def test_two_norms_on_one_input_keep_it_once() -> None:
    """GPT-NeoX with its parallel residual; without, each norm has an input of its own."""
    config = {
        "model_type": "gpt_neox", "vocab_size": 8, "hidden_size": 64, "intermediate_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 4,
    }  # fmt: skip
    sizes = []
    for is_parallel in (True, False):
        model = model_from_config({**config, "use_parallel_residual": is_parallel}, "tiny", "tiny.json")
        norm = next(m for m in model.blocks[0].modules if m.name == "post_attention_layernorm")
        sizes.append(norm.saved_bytes(SHAPE, WorkOptions()))
    assert sizes == [0, TOKENS * 64 * 2]


def test_an_rms_norm_in_python_shares_no_input() -> None:
    """Eager, it keeps an fp32 copy and a normalised tensor of its own (6 bytes); fused, only the input."""
    norm = Module("norm", Norm(64), (Parameter("weight", (64,)),), shares_input=True)
    assert norm.saved_bytes(SHAPE, WorkOptions()) == TOKENS * 64 * 6
    assert norm.saved_bytes(SHAPE, WorkOptions(compile=True)) == 0


@pytest.mark.parametrize(
    ("options", "tensors"),
    [
        (WorkOptions(), 5),
        (WorkOptions(compile=True), 5),
        (WorkOptions(liger=True), 5),
        (WorkOptions(compile=True, layers=layer_kernel_sets()["megatron"]), 3),
    ],
)
def test_a_fused_projection_stays_for_the_sake_of_its_slice_v(options: WorkOptions, tensors: int) -> None:
    """4 heads of 16: q, k and v of one product are 3 x 64 elements. The rotary embedding makes 2 x 64 more,
    also where inductor compiles it (torch 2.13: 17.55 tensors of the hidden size in a block with a fused
    projection, 15.55 with three). Liger copies q and k before it rotates them, and Megatron's take the
    projection's place. Each head has its log-sum-exp in fp32.
    """
    core = Module("core", Attention(4, 4, 16, 16, splits_fused_qkv=True))
    assert core.saved_bytes(SHAPE, options) == TOKENS * (tensors * 64 * 2 + 4 * 4)


def test_flash_attention_2_makes_gradients_of_keys_and_values_for_every_query_head() -> None:
    """32 query heads of 128 share 8 of keys: dk and dv of 32 heads each in bf16; with as many
    heads of keys nothing is added."""
    grouped = Module("core", Attention(32, 8, 128, 128))
    alike = Module("core", Attention(32, 32, 128, 128))
    plain, second = WorkOptions(), WorkOptions(expands_groups=True)
    extra = grouped.backward_extra_bytes(SHAPE, second) - grouped.backward_extra_bytes(SHAPE, plain)
    assert extra == 2 * SHAPE.tokens * 32 * 128 * 2
    assert alike.backward_extra_bytes(SHAPE, second) == alike.backward_extra_bytes(SHAPE, plain)
    written_out = WorkOptions(attention="math", expands_groups=True)
    assert grouped.backward_extra_bytes(SHAPE, written_out) == grouped.backward_extra_bytes(
        SHAPE, WorkOptions(attention="math")
    )


@pytest.mark.parametrize(
    ("kind", "is_trained", "extra"), [("rms", True, 18), ("gemma_rms", True, 16), ("rms", False, 20)]
)
def test_an_upcast_norm_holds_six_fp32_tensors_in_the_gradient_of_its_square(
    kind: str, is_trained: bool, extra: int
) -> None:
    """24 bytes an element, of which it keeps its fp32 input and what its weight multiplies: 6 in 16 bits, 8
    in fp32, 4 where the weight is frozen. The square's gradient is a power, twice it, and their product, with
    the gradient by way of the product with the root and that of the mean."""
    norm = Module("norm", Norm(1024, kind), (Parameter("weight", (1024,), trainable=is_trained),))
    assert norm.backward_extra_bytes(SHAPE, WorkOptions()) == extra * SHAPE.tokens * 1024
    assert norm.saved_bytes(SHAPE, WorkOptions()) == (24 - extra) * SHAPE.tokens * 1024
