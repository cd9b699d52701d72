"""A module's bytes as tensors: the cuts add up to what is counted."""

from __future__ import annotations

from itertools import product

import pytest

from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.specs.model.huggingface import load_model
from zsim.specs.model.spec import Attention, Loss, Module
from zsim.specs.strategy.training import losses

SHAPE = BatchShape(sequences=2, sequence_length=2048)
OPTIONS = [
    WorkOptions(),
    WorkOptions(compile=True),
    WorkOptions(attention="math"),
    WorkOptions(loss=losses()["fused"]),
    WorkOptions(loss=losses()["autocast"]),
    WorkOptions(autocast=True),
]


@pytest.mark.parametrize(("name", "options"), list(product(["gpt2", "llama-3-8b", "qwen2-7b"], OPTIONS)))
def test_tensors_add_up(name: str, options: WorkOptions) -> None:
    model = load_model(name)
    for module in (*model.before, *model.blocks[0].modules, *model.after):
        tensors = module.tensors(SHAPE, options)
        assert sum(tensors.saved) == module.saved_bytes(SHAPE, options)
        assert sum(tensors.forward) == module.forward_extra_bytes(SHAPE, options)
        assert sum(tensors.backward) == module.backward_extra_bytes(SHAPE, options)
        assert all(size > 0 for size in (*tensors.saved, *tensors.forward, *tensors.backward))


def test_a_gated_mlp_keeps_gate_and_up() -> None:
    """Llama 3 8B, 4,096 tokens: two tensors of 14,336 bf16 each, three in backward."""
    modules = {module.name: module for module in load_model("llama-3-8b").blocks[0].modules}
    one = 4096 * 14336 * 2
    tensors = modules["mlp.act_fn"].tensors(SHAPE, WorkOptions(compile=True))
    assert tensors.saved == (one, one)
    assert tensors.backward == (one, one, one)


def test_the_loss_under_autocast_keeps_two_tensors_and_makes_one_gradient_in_fp32() -> None:
    """4,096 tokens, 128,256 logits each: log-probabilities in bf16 and fp32; nll_loss fills an fp32
    gradient beside them, 10 bytes a logit, and what it read is gone before the gradient's cast."""
    loss = next(module for module in load_model("llama-3-8b").after if isinstance(module.op_spec, Loss))
    logits = 4096 * 128256
    tensors = loss.tensors(SHAPE, WorkOptions(loss=losses()["autocast"]))
    assert tensors.saved == (2 * logits, 4 * logits)
    assert tensors.backward == (4 * logits,)


def test_a_products_backward_finds_the_gradient_of_its_output() -> None:
    """That is there first; where autocast casts, the weight's is made in the low type, too."""
    modules = {module.name: module for module in load_model("llama-3-8b").blocks[0].modules}
    down, given, made = modules["mlp.down_proj"], 4096 * 14336 * 2, 4096 * 4096 * 2
    assert down.tensors(SHAPE, WorkOptions()).backward == (made, given)
    weight = 4096 * 14336 * 2
    cast = down.tensors(SHAPE, WorkOptions(autocast=True))
    assert (cast.saved, cast.backward) == ((given, weight), (made, given, weight))


def test_attentions_backward_finds_the_gradient_of_its_output() -> None:
    """4 heads of 8, 2 of them for k and v, 4,096 tokens in bf16: 64, 64, 32 and 32 bytes a token."""
    tensors = Module("core", Attention(4, 2, 8, 8, rotary=False)).tensors(SHAPE, WorkOptions())
    assert tensors.backward[:4] == (64 * 4096, 64 * 4096, 32 * 4096, 32 * 4096)


def test_gathered_attention_keeps_q_k_and_v_in_one_tensor() -> None:
    """4 heads of 8, 4,096 tokens: q, k and v 192 bytes a token, the output 64, its fp32 sum 128; 8 bytes of
    index and 16 of log-sum-exp are what is left of what is kept."""
    masked = Module("core", Attention(4, 4, 8, 8, rotary=False, unpads=True))
    tensors = masked.tensors(SHAPE, WorkOptions())
    assert tensors.saved == (192 * 4096, 64 * 4096, 24 * 4096)
    assert tensors.forward == (192 * 4096, 128 * 4096)
    assert tensors.backward[:2] == (64 * 4096, 192 * 4096)


@pytest.mark.parametrize(
    ("rotary", "dropout", "kept", "passing"),
    [(True, 0.0, (4, 2), (128, 128)), (False, 0.1, (2, 1, 2), ())],
)
def test_written_out_attention_has_scores_in_tensors_of_their_own(
    *, rotary: bool, dropout: float, kept: tuple[int, ...], passing: tuple[int, ...]
) -> None:
    """Llama's softmax in fp32, cast back; GPT-2's in 16 bits, with a mask of a byte each. Two passing in
    forward and two gradients."""
    core = Attention(4, 4, 8, 8, rotary=rotary, dropout=dropout, upcasts_softmax=rotary)
    shape, options = BatchShape(sequences=1, sequence_length=2), WorkOptions("bf16", "math")
    tensors = Module("core", core).tensors(shape, options)
    hidden, scores = 2 * 4 * 8 * 2, 4 * 2 * 2
    assert tensors.saved == (*[hidden] * 3, *(scores * each for each in kept))
    assert tensors.forward == (hidden, *passing, scores * 2, scores * 2)
    gradient = scores * (4 if rotary else 2)
    assert tensors.backward == (*[hidden] * 4, gradient, gradient)
