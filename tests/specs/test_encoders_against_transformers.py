"""Encoders, and encoders with decoders, against transformers' own classes."""

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
from zsim.specs.model.spec import ModelSpec

TOKENS = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BART = {
    **TOKENS, "decoder_start_token_id": 1, "d_model": 64, "encoder_layers": 2, "decoder_layers": 3,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 192, "max_position_embeddings": 128, "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0, "dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
TRANSLATORS = {
    "Bart": "BartForConditionalGeneration", "MBart": "MBartForConditionalGeneration",
    "M2M100": "M2M100ForConditionalGeneration", "Marian": "MarianMTModel",
    "Pegasus": "PegasusForConditionalGeneration",
}  # fmt: skip


def named(model: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]


def work(spec: ModelSpec, shape: BatchShape, options: WorkOptions) -> tuple[float, int]:
    """(FLOPs, bytes kept) of all modules but head and loss."""
    in_blocks = (one for block in spec.blocks for one in block.modules)
    modules = (*spec.before, *in_blocks, *spec.after[:-1])
    kernels = [kernel for one in modules for kernel in one.kernels(FORWARD, shape.seen_by(one), options)]
    kept = sum(one.saved_bytes(shape.seen_by(one), options) for one in modules)
    return sum(kernel.flops for kernel in kernels), kept


@pytest.mark.parametrize("family", TRANSLATORS)
def test_a_translator_has_the_parameters_the_flops_and_keeps_the_bytes_of_transformers(family: str) -> None:
    """Twice 128 tokens of either half, with attention written out: names and shapes in order, FLOPs exactly,
    bytes within 1 %. Without dropout, whose mask on a CPU is as wide as what it drops.
    """
    config = getattr(transformers, f"{family}Config")(**BART)
    kind = getattr(transformers, TRANSLATORS[family])
    module = kind._from_config(config, attn_implementation="eager").to(torch.bfloat16).train()
    spec = model_from_config(config.to_dict(), "tiny", "tiny.json")
    assert named(spec) == named(module)
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert {name for name, parameter in spec.named_parameters() if parameter.trainable} == trained
    tokens = torch.zeros(2, 128, dtype=torch.long)
    flops, kept = work(spec, BatchShape(2, 128), WorkOptions(attention="math"))

    def run() -> Any:
        return module(input_ids=tokens, decoder_input_ids=tokens, use_cache=False).logits

    with FlopCounterMode(display=False) as counter:
        run()
    assert flops == counter.get_total_flops()
    assert kept == pytest.approx(saved_bytes(module.parameters(), run), rel=0.01)
