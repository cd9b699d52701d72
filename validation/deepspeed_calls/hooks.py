"""The order in which ZeRO-3 enters the modules of Hugging Face's models: `python -m
validation.deepspeed_calls.hooks --out traces/deepspeed`.

The real classes of transformers, two blocks each, trained by the real DeepSpeed on one rank; written down is
the module of each `fetch_sub_module` in one forward and backward. zsim's order is held to it."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from validation.launch import run
from validation.provenance import provenance, write_checksums

_LLAMA_LIKE = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
_CLASSIC = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA_LIKE,
    "llama-tied": {**_LLAMA_LIKE, "tie_word_embeddings": True},
    "mistral": _LLAMA_LIKE,
    "qwen2": _LLAMA_LIKE,
    "qwen3": {**_LLAMA_LIKE, "head_dim": 16},
    "gemma2": {**_LLAMA_LIKE, "head_dim": 16},
    "phi3": {**_LLAMA_LIKE, "pad_token_id": 0},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 64},
    "gpt2-no-dropout": {
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 128,
        "n_positions": 64,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "gpt_neo": {
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 128,
        "max_position_embeddings": 64,
        "attention_types": [[["global", "local"], 1]],
    },
    "gpt_neox": {**_CLASSIC, "intermediate_size": 256, "max_position_embeddings": 64},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 64, "rotary_dim": 8},
    "opt": {**_CLASSIC, "ffn_dim": 256, "max_position_embeddings": 64, "word_embed_proj_dim": 64},
    "mpt": {"d_model": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 128, "max_seq_len": 64},
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128},
    "falcon": {**_CLASSIC, "new_decoder_architecture": False, "multi_query": True},
}


def family(name: str) -> str:
    """The model family of a case: `llama-tied` -> `llama`."""
    return name.partition("-")[0]


def entered(rank: int, world_size: int, config: dict[str, Any], model_type: str, checkpointing: bool) -> Any:
    """Names of the modules in the order in which the fourth step enters them; the model itself is ""."""
    import torch
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
    from transformers import AutoConfig, AutoModelForCausalLM

    from validation.backends import Optimization, Strategy, make_trainer
    from validation.deepspeed_calls.configurations import STAGE_3, configuration

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config))
    if checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    recording = configuration("hooks", {**STAGE_3})
    trainer = make_trainer(Strategy("deepspeed", dict(recording.options)), model, Optimization())
    names = {id(module): name for name, module in model.named_modules()}
    seen: list[str] = []
    original = PartitionedParameterCoordinator.fetch_sub_module

    def noted(self: Any, module: Any, forward: bool) -> None:
        seen.append(names[id(module)])
        original(self, module, forward)

    PartitionedParameterCoordinator.fetch_sub_module = noted
    tokens = torch.arange(2 * 16).view(2, 16) % 100
    for _ in range(4):
        seen.clear()
        loss = trainer.model(input_ids=tokens, labels=tokens, use_cache=False).loss  # type: ignore[attr-defined]
        trainer.model.backward(loss)  # type: ignore[attr-defined]
        trainer.model.step()  # type: ignore[attr-defined]
    PartitionedParameterCoordinator.fetch_sub_module = original
    trainer.close()
    return list(seen)


def cases() -> Iterator[tuple[str, bool]]:
    for name in CONFIGS:
        yield name, False
    for name in ("llama", "gpt2", "gpt2-no-dropout", "gpt_neox", "phi3"):
        yield name, True


def main(words: list[str]) -> int:
    arguments = argparse.ArgumentParser(
        prog="python -m validation.deepspeed_calls.hooks", description=__doc__
    )
    arguments.add_argument("--out", type=Path, metavar="DIR", required=True)
    options = arguments.parse_args(words)
    missing = [name for name in ("deepspeed", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"SKIPPED: not installed: {', '.join(missing)} (see validation/README.md)", file=sys.stderr)
        return 3
    rows = []
    for name, checkpointing in cases():
        arguments_of_rank = (CONFIGS[name], family(name), checkpointing)
        (order,) = run("validation.deepspeed_calls.hooks:entered", 1, arguments_of_rank, timeout=120)
        config = {"model_type": family(name), **CONFIGS[name]}
        case = {"name": name, "checkpointing": checkpointing, "config": config, "entered": order}
        rows.append(f"  {json.dumps(case)}")
        print(f"{name}{' checkpointed' if checkpointing else ''}: {len(order)} modules entered", flush=True)
    origin = provenance(
        "python -m validation.deepspeed_calls.hooks", transformers=importlib.metadata.version("transformers")
    )
    text = ",\n".join(rows)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "hooks.json").write_text(
        f'{{"format": 1,\n "provenance": {json.dumps(origin)},\n "models": [\n{text}\n]}}\n'
    )
    if options.out.parent.name == "traces":
        write_checksums(options.out.parent)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
