"""What TRL's GRPOTrainer really calls over a rollout, with an engine that only counts.

python -m validation.rl.call_order --out validation/rl/call_orders.json         needs trl (pip install trl)

A tiny Llama learns on the CPU for two rollouts, and the calls from the second one's weight sync on are
written down: vLLM's class and client are replaced by counters, everything else is the package's own code.
`tests/workflows/test_call_order.py` holds zsim's phases, passes and bytes to the file where the package is
not installed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from validation.provenance import provenance

MODEL = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
PROMPTS, SAMPLES, MICRO_BATCH, UPDATES = 2, 4, 2, 2
PROMPT_TOKENS, RESPONSE_TOKENS = 3, 7
CASES: Mapping[str, Mapping[str, Any]] = {
    "colocated": {"vllm_mode": "colocate", "beta": 0.04},
    "colocated, engine asleep": {"vllm_mode": "colocate", "beta": 0.04, "vllm_enable_sleep_mode": True},
    "split, no reference": {"vllm_mode": "server", "beta": 0.0},
}
Call = tuple[str, int]
"""What is called, and how much: bytes of a tensor, prompts, tokens of a micro-batch, or 0."""


class Engine:
    """vLLM's `LLM` and TRL's `VLLMClient` in one, which count."""

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls
        model = SimpleNamespace(load_weights=self._load)
        runner = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=runner))

    def init_communicator(self, **_: Any) -> None: ...

    def get_server_info(self) -> Any:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def reset_prefix_cache(self) -> None: ...

    def sleep(self, level: int) -> None:
        self.calls.append((f"sleep at level {level}", 0))

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append((f"wake {' and '.join(tags)}", 0))

    def _load(self, weights: Iterable[tuple[str, Any]]) -> None:
        self.calls.extend(("weight_sync", value.numel() * value.element_size()) for _, value in weights)

    def update_named_params(self, metadata: Sequence[Any], weights: Iterable[tuple[str, Any]]) -> None:
        self._load(weights)

    def generate(self, prompts: Sequence[Any], n: int = 1, **_: Any) -> Any:
        """Answers of one token again and again, in the form of the class or of the client."""
        self.calls.append(("rollout", len(prompts) * n))
        answer = [5] * (RESPONSE_TOKENS - 1) + [1]
        if not isinstance(prompts[0], dict):
            count = len(prompts) * n
            logprobs = [[[-1.0]] * len(answer)] * count
            ids = {"prompt_ids": list(prompts), "completion_ids": [answer] * count, "logprobs": logprobs}
            return {**ids, "logprob_token_ids": [[[token] for token in answer]] * count}
        choice = SimpleNamespace(logprob=-1.0, rank=1)
        output = SimpleNamespace(token_ids=answer, logprobs=[{token: choice} for token in answer])
        return [SimpleNamespace(prompt_token_ids=p["prompt_token_ids"], outputs=[output]) for p in prompts]


def calls_of(settings: Mapping[str, Any]) -> list[Call]:
    """The calls of the second rollout, from its weight sync to its last update."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation
    from trl.trainer import grpo_trainer

    calls: list[Call] = []
    for module in (vllm_generation, grpo_trainer):
        module.is_vllm_available = lambda *_, **__: True
    for name in ("LLM", "VLLMClient"):
        setattr(vllm_generation, name, lambda **_: Engine(calls))
    vllm_generation.SamplingParams = dict
    vllm_generation.empty_cache = lambda: None
    words = {"<pad>": 0, "</s>": 1, **{f"w{index}": index for index in range(2, 64)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL)).save_pretrained(folder)
        trainer = GRPOTrainer(
            model=folder,
            reward_funcs=lambda completions, **_: [float(index) for index in range(len(completions))],
            args=GRPOConfig(
                output_dir=folder, use_cpu=True, bf16=False, report_to=[], save_strategy="no",
                logging_strategy="no", disable_tqdm=True, max_steps=2 * UPDATES, use_vllm=True,
                per_device_train_batch_size=MICRO_BATCH, num_generations=SAMPLES, max_completion_length=8,
                steps_per_generation=PROMPTS * SAMPLES // MICRO_BATCH,
                gradient_accumulation_steps=PROMPTS * SAMPLES // MICRO_BATCH // UPDATES, **settings,
            ),
            train_dataset=Dataset.from_dict({"prompt": [" ".join(["w3"] * PROMPT_TOKENS)] * 16}),
            processing_class=PreTrainedTokenizerFast(
                tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>"
            ),
        )  # fmt: skip
        for name, model in (("policy", trainer.model), ("reference", trainer.ref_model)):
            if model is not None:
                _count(calls, name, model, torch.is_grad_enabled)
        optimizer = trainer.create_optimizer()
        optimizer.register_step_pre_hook(lambda *_: calls.append(("update", 0)))
        trainer.train()
    begin = [index for index, (name, _) in enumerate(calls) if name == "update"][UPDATES - 1] + 1
    return calls[begin:]


def _count(calls: list[Call], name: str, model: Any, has_gradients: Any) -> None:
    """Write down the micro-batches of a model."""

    def before(_: Any, __: Any, values: Mapping[str, Any]) -> None:
        phase = "training" if has_gradients() else "old_logprobs" if name == "policy" else name
        calls.append((phase, values["input_ids"].numel()))

    model.register_forward_pre_hook(before, with_kwargs=True)


def in_a_row(calls: Iterable[Call]) -> list[tuple[str, int, int]]:
    """Calls of the same thing in a row: its name, their number, and how much in all."""
    rows = [(name, [amount for _, amount in group]) for name, group in groupby(calls, lambda call: call[0])]
    return [(name, len(amounts), sum(amounts)) for name, amounts in rows]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m validation.rl.call_order", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the calls there")
    options = parser.parse_args(words)
    if importlib.util.find_spec("trl") is None:
        print("SKIPPED: TRL is not installed (pip install trl)", file=sys.stderr)
        return 3
    found = {name: in_a_row(calls_of(settings)) for name, settings in CASES.items()}
    origin = provenance("python -m validation.rl.call_order", trl=importlib.metadata.version("trl"))
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(calls)}" for name, calls in found.items())
    text = f'{{"provenance": {json.dumps(origin)},\n "calls": {{\n{rows}\n}}}}\n'
    if options.out:
        options.out.write_text(text)
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
