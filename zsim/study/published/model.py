"""From the architecture columns of a published run to a Hugging Face config."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from zsim.errors import NotSimulatedError
from zsim.specs.model.spec import Attention, Loss, ModelSpec, Module
from zsim.study.published.table import PublishedRun

_DECODERS = ("", "decoder")


def model_config(run: PublishedRun) -> dict[str, Any]:
    """The row's model in the shape of a `config.json`.

    GELU models are GPT-2's block, biases and learned positions included (what "exact" counts of the tables
    confirm); SwiGLU models Llama's or, with biases on q, k and v, Qwen 2's. Raises NotSimulatedError for
    architectures that are neither, and for rows whose shape is not published.
    """
    kind = run.text("arch_type")
    if kind not in _DECODERS:
        raise NotSimulatedError(f"architecture '{kind}' is not simulated; only decoders are")
    shape = _shape(run)
    mlp = run.text("mlp_type")
    if not mlp:
        raise NotSimulatedError("the shape is not published: no mlp_type")
    if mlp == "gelu":
        return _gpt(run, shape)
    if mlp == "swiglu":
        return _llama(run, shape)
    raise NotSimulatedError(f"MLPs of type '{mlp}' are not simulated from a table")


def _shape(run: PublishedRun) -> dict[str, int]:
    shape = {column: run.count(column) for column in ("n_layers", "hidden", "n_heads", "vocab", "seq_len")}
    missing = [column for column, value in shape.items() if not value]
    if missing:
        raise NotSimulatedError(f"the shape is not published: no {', '.join(missing)}")
    return {column: value for column, value in shape.items() if value}


def _gpt(run: PublishedRun, shape: dict[str, int]) -> dict[str, Any]:
    hidden, heads = shape["hidden"], shape["n_heads"]
    kv_heads = run.count("n_kv_heads") or heads
    if kv_heads not in (1, heads):
        raise NotSimulatedError(f"GELU models with {kv_heads} key/value heads are not simulated from a table")
    # Megatron, minGPT and DeepSpeed's examples train with dropout; llm-foundry and later recipes do not.
    dropout = 0.1 if re.search(r"unfused|no flash|local impl", run.text("attn_kernel")) else 0.0
    return {
        "model_type": "gpt2" if kv_heads == heads else "gpt_bigcode",
        "n_embd": hidden,
        "n_head": heads,
        "n_layer": shape["n_layers"],
        "n_inner": run.count("ffn") or 4 * hidden,
        "vocab_size": shape["vocab"],
        "n_positions": shape["seq_len"],
        "activation_function": "gelu",
        "tie_word_embeddings": run.text("tied_emb") != "False",
        "resid_pdrop": dropout,
        "attn_pdrop": dropout,
        "embd_pdrop": dropout,
    }


def _llama(run: PublishedRun, shape: dict[str, int]) -> dict[str, Any]:
    ffn = run.count("ffn")
    if not ffn:
        raise NotSimulatedError("the shape is not published: no ffn")
    return {
        "model_type": "qwen2" if "qwen2" in run.text("model").lower() else "llama",
        "hidden_size": shape["hidden"],
        "num_attention_heads": shape["n_heads"],
        "num_key_value_heads": run.count("n_kv_heads") or shape["n_heads"],
        "num_hidden_layers": shape["n_layers"],
        "intermediate_size": ffn,
        "vocab_size": shape["vocab"],
        "max_position_embeddings": shape["seq_len"],
        "tie_word_embeddings": run.text("tied_emb") == "True",
    }


def is_composer(run: PublishedRun) -> bool:
    """MosaicML's runs, on composer."""
    return "MP mode" in run.text("strategy") or "composer" in run.text("software")


def composer_model(run: PublishedRun, model: ModelSpec) -> ModelSpec:
    """The model as MosaicML's trainer and model code run it at the row's date.

    - Every micro-batch ends with two metrics, LanguageCrossEntropy and Perplexity, which each take torch's
      cross-entropy of the logits again, under autocast (llm-foundry: `train_metrics` of its models, on by
      default; composer: `_train_microbatch`, "Use microbatch outputs to update training metrics",
      `_eval_train_metrics`; its pull request 2987 of February 2024 is the first to think of a fused one).
    - Until February 2023 attention is flash-attn 0.2's `FlashMHA`, always given a padding mask (the same
      file as the loss's, "So we always provide a tensor"), whose longest sequence the host reads back
      (`unpad_input`); the Triton kernel after takes none.
    """
    model = with_loss(model, num_metrics=2, holds_logits="as they are")
    return with_attention(model, unpads=True, host_waits=True) if is_early_composer(run) else model


def holding_model(run: PublishedRun, model: ModelSpec) -> ModelSpec:
    """The model of a loop that keeps a name for its logits during backward: torchtitan's until its pull
    request 391 of June 2024 (`pred`, which the model has cast to fp32), fms-fsdp's until its 152 of July 2025
    (`output`)."""
    if run.source.startswith("torchtitan") and run.text("date") < "2024-06":
        return with_loss(model, holds_logits="in fp32")
    if run.source == "fms-fsdp" and run.text("date") < "2025-07":
        return with_loss(model, holds_logits="as they are")
    return model


def with_loss(model: ModelSpec, **changes: Any) -> ModelSpec:
    """The model with its loss changed."""
    return replace(model, after=_changed(model.after, Loss, changes))


def is_early_composer(run: PublishedRun) -> bool:
    """MosaicML's runs before March 2023: another attention kernel and another loss."""
    return is_composer(run) and run.text("date") < "2023-03"


def with_attention(model: ModelSpec, **changes: Any) -> ModelSpec:
    """The model with its blocks' attention changed."""
    blocks = (replace(block, modules=_changed(block.modules, Attention, changes)) for block in model.blocks)
    return replace(model, blocks=tuple(blocks))


def _changed(modules: tuple[Module, ...], kind: type[Any], changes: dict[str, Any]) -> tuple[Module, ...]:
    return tuple(
        replace(module, work=replace(module.work, **changes)) if isinstance(module.work, kind) else module
        for module in modules
    )


def cross_entropy(run: PublishedRun) -> str | None:
    """MosaicML's loss is torch's, under autocast, until February 2023 (llm-foundry@d14a7c94a,
    examples/llm/src/mosaic_gpt.py), flash-attn's fused one after (its `loss_fn` then defaults to
    `fused_crossentropy`); the fast kernels of fms-acceleration bring unsloth's, or Liger's; Megatron has its
    own; torchtitan compiles its blocks and, since its pull request 1033 of April 2025, its loss ("compiling
    loss function causes CUDA errors, turning off for now" until then); None leaves it to the rest."""
    software = run.text("software")
    if run.source.startswith("torchtitan") and run.text("date") < "2025-04":
        return "eager"
    if is_composer(run):
        return "autocast" if is_early_composer(run) else "fused"
    if "foak" in software:
        return "fused_linear" if software.endswith("-liger") else "unsloth"
    if software.startswith("InternEvo"):  # flash-attn's CrossEntropyLoss (model/loss.py)
        return "fused"
    if software.startswith("nanotron"):  # its sharded_cross_entropy works in place too
        return "megatron"
    return "megatron" if "egatron" in software else None
