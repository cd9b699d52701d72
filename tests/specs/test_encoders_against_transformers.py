"""Encoders, and encoders with decoders, against transformers' own classes."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install zsim[capture]")
pytest.importorskip("transformers", reason="needs transformers: pip install zsim[transformers]")

import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from tests.saved_bytes import forward_work, saved_bytes
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
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

ENCODER = {
    **TOKENS, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
ENCODERS: dict[str, dict[str, Any]] = {
    "Bert": ENCODER,
    "Roberta": ENCODER,
    "Electra": {**ENCODER, "embedding_size": 32},
    "DistilBert": {
        "vocab_size": 100, "dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 96, "dropout": 0.0,
        "attention_dropout": 0.0, "qa_dropout": 0.0,
    },
    "ModernBert": {**ENCODER, "cls_token_id": 1, "sep_token_id": 2},
}  # fmt: skip
TASKS = ("MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering")


def named(model: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]


def work(spec: ModelSpec, shape: BatchShape, options: WorkOptions) -> tuple[float, int]:
    """(FLOPs, bytes kept) of all modules but head and loss."""
    in_blocks = (one for block in spec.blocks for one in block.modules)
    return forward_work((*spec.before, *in_blocks, *spec.after[:-1]), shape, options)


@pytest.mark.parametrize("family", TRANSLATORS)
def test_a_translator_has_the_parameters_the_flops_and_keeps_the_bytes_of_transformers(family: str) -> None:
    """Twice 128 tokens of either half, with attention written out: names and shapes, FLOPs exactly, bytes
    within 1 %. Without dropout, whose mask on a CPU is as wide as what it drops.
    """
    config = getattr(transformers, f"{family}Config")(**BART)
    kind = getattr(transformers, TRANSLATORS[family])
    module = kind._from_config(config, attn_implementation="eager").to(torch.bfloat16).train()
    spec = model_from_config(config.to_dict(), "tiny", "tiny.json")
    assert sorted(named(spec)) == sorted(
        named(module)
    )  # the decoder's table comes before the encoder's blocks
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


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("family", ENCODERS)
def test_an_encoder_has_the_parameters_the_flops_and_keeps_the_bytes_of_transformers(
    family: str, task: str
) -> None:
    """Twice 128 tokens: names and shapes in order, FLOPs exactly and bytes within 1 % with attention written
    out, but for the head of sequences, which transformers has read one token, and ModernBERT's windows, which
    it masks.
    """
    config = getattr(transformers, f"{family}Config")(**ENCODERS[family], num_labels=3)
    config.architectures = [f"{family}For{task}"]
    kind = getattr(transformers, config.architectures[0])
    config.num_labels = 2 if task == "QuestionAnswering" else 3
    module = kind._from_config(config, attn_implementation="eager").to(torch.bfloat16).train()
    spec = model_from_config(config.to_dict(), "tiny", "tiny.json")
    assert named(spec) == named(module)
    if task == "SequenceClassification" or family == "ModernBert":
        return
    tokens = torch.zeros(2, 128, dtype=torch.long)
    flops, kept = work(spec, BatchShape(2, 128), WorkOptions(attention="math"))
    with FlopCounterMode(display=False) as counter:
        module(input_ids=tokens)
    assert flops == counter.get_total_flops()
    assert kept == pytest.approx(saved_bytes(module.parameters(), lambda: module(input_ids=tokens)), rel=0.01)


@pytest.mark.parametrize("family", ["Bert", "DistilBert", "Electra"])
def test_a_head_of_words_that_is_not_tied_has_the_parameters_of_transformers(family: str) -> None:
    config = getattr(transformers, f"{family}Config")(**ENCODERS[family], tie_word_embeddings=False)
    with torch.device("meta"):
        module = getattr(transformers, f"{family}ForMaskedLM")(config)
    assert sorted(named(model_from_config(config.to_dict(), "tiny", "tiny.json"))) == sorted(named(module))
