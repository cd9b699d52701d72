"""What layers keep for backward, and the FLOPs of their products, against transformers' own eager code in 16
bits.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install zsim[capture]")
pytest.importorskip("transformers", reason="needs transformers: pip install zsim[transformers]")

import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from tests.saved_bytes import saved_bytes
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations.operation import FORWARD
from zsim.specs.model.huggingface import model_from_config

TOKENS = 128
SIZES = {
    "num_hidden_layers": 6, "hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 128, "intermediate_size": 768, "vocab_size": 200, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}  # fmt: skip
LINEAR, FULL = "linear_attention", "full_attention"
LAYERS: dict[str, tuple[str, dict[str, Any], int]] = {
    "gated attention": (
        "Qwen3_5TextConfig", {**DELTA, "layer_types": [LINEAR, LINEAR, LINEAR, FULL, LINEAR, LINEAR]}, 3,
    ),
    "short convolution": ("Lfm2Config", {"layer_types": ["conv", "conv", FULL, "conv", "conv", "conv"]}, 0),
    "attention beside short convolutions": (
        "Lfm2Config", {"layer_types": ["conv", "conv", FULL, "conv", "conv", "conv"]}, 2,
    ),
    "attention of Olmo Hybrid": (
        "OlmoHybridConfig", {"layer_types": [LINEAR, LINEAR, LINEAR, FULL, LINEAR, FULL]}, 3,
    ),
    "Gemma 4 with a window": ("Gemma4TextConfig", {"hidden_size_per_layer_input": 0}, 0),
    "Gemma 4 with one product for keys and values": (
        "Gemma4TextConfig",
        {
            "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 2,
            "global_head_dim": 256,
        },
        5,
    ),
    "GLM 4": ("Glm4Config", {}, 0),
    "Apertus's activation, written out": ("ApertusConfig", {}, 0),
    "squared ReLU": ("ArceeConfig", {}, 0),
    "LayerNorm and squared ReLU": ("Jais2Config", {"num_key_value_heads": 4}, 0),
    "Nemotron with half a head rotated": ("NemotronConfig", {"partial_rotary_factor": 0.5}, 0),
    "Seed OSS": ("SeedOssConfig", {"attention_dropout": 0.0, "residual_dropout": 0.0}, 0),
    "attention beside an MLP": ("CohereConfig", {}, 0),
    "Hunyuan": ("HunYuanDenseV1Config", {}, 0),
    "Ministral 3": ("Ministral3Config", {}, 0),
    "CWM with a window": ("CwmConfig", {}, 1),
    "OLMo 2": ("Olmo2Config", {}, 0),
    "EXAONE's mixture, a dense layer": ("ExaoneMoeConfig", {"first_k_dense_replace": 6}, 0),
    "Trinity, a dense layer with a gate": ("AfmoeConfig", {"num_dense_layers": 6}, 0),
    "VaultGemma": ("VaultGemmaConfig", {}, 0),
    "Gemma 4 12B": ("Gemma4UnifiedTextConfig", {}, 5),
}  # fmt: skip


class _InputError(Exception):
    """The layer's input is known."""


def _inputs_of(model: Any, layer: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the layer in a forward of the model, of which the first needs a gradient."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def record(module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        calls.append((arguments, keywords))
        raise _InputError

    handle = layer.register_forward_pre_hook(record, with_kwargs=True)
    with pytest.raises(_InputError), torch.no_grad():
        model(torch.zeros(1, TOKENS, dtype=torch.long), use_cache=False)
    handle.remove()
    (first, *others), keywords = calls[0]
    return (first.detach().requires_grad_(), *others), keywords


@pytest.mark.parametrize("case", LAYERS)
def test_a_layer_keeps_the_bytes_of_transformers(case: str) -> None:
    """Within 1 %: statistics of norms, 4 or 8 bytes a row, are neglected. FLOPs exactly, but for those of
    a convolution of three taps."""
    name, changes, index = LAYERS[case]
    kind = getattr(transformers, name, None)
    if kind is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    config = kind(**{**SIZES, **changes})
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).train()
    layer = model.model.layers[index]
    arguments, keywords = _inputs_of(model, layer)
    shared = (*layer.parameters(), *keywords["position_embeddings"])  # of all layers
    measured = saved_bytes(shared, lambda: layer(*arguments, **keywords))
    block = model_from_config(config.to_dict(), "tiny", "tiny.json").blocks[index]
    shape, options = BatchShape(1, TOKENS), WorkOptions(attention="math")
    kept = sum(module.saved_bytes(shape.seen_by(module), options) for module in block.modules)
    assert kept == pytest.approx(measured, rel=0.01)
    with FlopCounterMode(display=False) as counter:
        layer(*arguments, **keywords)
    kernels = (
        kernel
        for module in block.modules
        for kernel in module.kernels(FORWARD, shape.seen_by(module), options)
    )
    flops = sum(kernel.flops for kernel in kernels)
    assert flops == pytest.approx(counter.get_total_flops(), rel=1e-3 if "conv" in case else 1e-12)
