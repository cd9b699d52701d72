"""The plain Llama and its fused norm."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install zsim[validate]")

from validation import fused  # noqa: E402
from validation.llama import Llama, find_shape  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("llama-3.2-1b", 1_235_814_400),
    ],
)
def test_parameters_are_counted_as_hugging_face_counts_them(name: str, parameters: int) -> None:
    """Expected: totals of Hugging Face's LlamaForCausalLM on the meta device, tied weights once."""
    with torch.device("meta"):
        model = Llama(find_shape(name))
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_modules_are_named_as_in_hugging_face() -> None:
    with torch.device("meta"):
        names = [name for name, _ in Llama(find_shape("llama-3-8b@1")).named_parameters()]
    block = "model.layers.0."
    assert names == [
        "model.embed_tokens.weight",
        *[f"{block}self_attn.{projection}_proj.weight" for projection in "qkvo"],
        *[f"{block}mlp.{projection}_proj.weight" for projection in ("gate", "up", "down")],
        f"{block}input_layernorm.weight",
        f"{block}post_attention_layernorm.weight",
        "model.norm.weight",
        "lm_head.weight",
    ]


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no Llama named 'llama-9'; expected one of llama-2-7b"):
        find_shape("llama-9")


def test_a_config_json_of_another_family_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match="model_type is 'gpt2'"):
        find_shape(str(path))


def test_the_fused_norm_computes_what_torch_computes() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, 16, requires_grad=True)
    weight = torch.randn(16, requires_grad=True)
    grad = torch.randn(3, 5, 16)
    ours, theirs = fused.rms_norm(x, weight, 1e-5)[0], torch.nn.functional.rms_norm(x, (16,), weight, 1e-5)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        torch.autograd.grad(ours, (x, weight), grad), torch.autograd.grad(theirs, (x, weight), grad)
    )


def test_the_future_does_not_reach_the_past() -> None:
    """Changing the last token changes no earlier logit: attention is causal, positions are kept apart."""
    torch.manual_seed(0)
    model = Llama(find_shape("llama-tiny"))
    tokens = torch.randint(0, 128, (1, 8))
    before = model(tokens, tokens).logits
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 128
    after = model(changed, tokens).logits
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


def test_both_codes_compute_the_same() -> None:
    tokens = torch.randint(0, 128, (2, 8), generator=torch.Generator().manual_seed(1))
    outputs = []
    for code in ("transformers", "torchtitan"):
        torch.manual_seed(0)
        outputs.append(Llama(find_shape("llama-tiny"), code=code)(tokens, tokens))
    torch.testing.assert_close(*outputs)


def test_checkpointing_changes_no_gradient() -> None:
    tokens = torch.randint(0, 128, (2, 8), generator=torch.Generator().manual_seed(1))
    grads = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = Llama(find_shape("llama-tiny"), checkpointing=checkpointing)
        model(tokens, tokens).loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
