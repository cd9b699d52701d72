"""What trainers of reinforcement learning really call over a rollout, with an engine that only counts.

python -m validation.rl.call_order --out validation/rl/call_orders.json  needs trl or verl (pip install trl)

A tiny Llama learns on the CPU. TRL's GRPOTrainer runs two rollouts, of which the calls from the second one's
weight sync on are written down: vLLM's class and client are replaced by counters, everything else is the
package's own code. verl's actor and reference get samples of given lengths with `use_dynamic_bsz`, and their
micro-batches are written down (Ray, which they do not call, is a stand-in where it is missing). What is
installed replaces its part of the file. `tests/workflows/test_call_order.py` holds zsim's phases, passes and
bytes to the file where the packages are not installed.
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
from functools import partial
from itertools import groupby
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from validation.provenance import provenance

MODEL = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
RECORDED = Path(__file__).parent / "call_orders.json"
PROMPTS, SAMPLES, MICRO_BATCH, UPDATES = 2, 4, 2, 2
PROMPT_TOKENS, RESPONSE_TOKENS = 3, 7
CASES: Mapping[str, Mapping[str, Any]] = {
    "colocated": {"vllm_mode": "colocate", "beta": 0.04},
    "colocated, engine asleep": {"vllm_mode": "colocate", "beta": 0.04, "vllm_enable_sleep_mode": True},
    "split, no reference": {"vllm_mode": "server", "beta": 0.0},
}
VERL = "verl, dynamic batches"
VERL_LENGTHS = (10, 8, 9, 7, 10, 7, 8, 9)
"""Tokens of verl's samples, any two of which are more than `VERL_TOKENS`."""
VERL_TOKENS, VERL_MINI_BATCH = 12, 4
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


def _count(calls: list[Call], name: str, model: Any, has_gradients: Any, counted: str = "input_ids") -> None:
    """Write down the micro-batches of a model, with the tokens of what is `counted`."""

    def before(_: Any, __: Any, values: Mapping[str, Any]) -> None:
        phase = "training" if has_gradients() else "old_logprobs" if name == "policy" else name
        tokens = values[counted]
        calls.append((phase, tokens.numel() if counted == "input_ids" else int(tokens.sum())))

    model.register_forward_pre_hook(before, with_kwargs=True)


def verl_calls() -> list[Call]:
    """The micro-batches of verl's actor and reference over a rollout, with their tokens without padding."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29581"}
    missing = [name for name in _VERL_UNUSED if importlib.util.find_spec(name.partition(".")[0]) is None]
    sys.modules |= {name: _StandIn(name) for name in missing}
    import torch
    import transformers

    if not hasattr(transformers, "AutoModelForVision2Seq"):  # of transformers 5
        transformers.AutoModelForVision2Seq = transformers.AutoModelForImageTextToText
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    from verl import DataProto
    from verl.workers.actor.dp_actor import DataParallelPPOActor
    from verl.workers.config import FSDPActorConfig

    calls: list[Call] = []
    settings = {
        "strategy": "fsdp", "rollout_n": SAMPLES, "ppo_mini_batch_size": VERL_MINI_BATCH,
        "use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": VERL_TOKENS, "use_torch_compile": False,
        "use_kl_loss": True, "kl_loss_coef": 0.1,
    }  # fmt: skip
    workers = {}
    for name in ("policy", "reference"):
        config = transformers.AutoConfig.for_model(**MODEL)
        model = transformers.AutoModelForCausalLM.from_config(config)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: calls.append(("update", 0)))
        _count(calls, name, model, torch.is_grad_enabled, "attention_mask")
        workers[name] = DataParallelPPOActor(FSDPActorConfig(**settings), model, optimizer)
    answers = VERL_TOKENS - PROMPT_TOKENS
    mask = torch.zeros(len(VERL_LENGTHS), VERL_TOKENS, dtype=torch.long)
    for row, tokens in zip(mask, VERL_LENGTHS, strict=True):
        row[:tokens] = 1
    ids, ones = torch.full_like(mask, 3), torch.ones(len(VERL_LENGTHS), answers)
    data = DataProto.from_dict(tensors={
        "input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clip(0),
        "responses": ids[:, PROMPT_TOKENS:], "response_mask": mask[:, PROMPT_TOKENS:], "advantages": ones,
    })  # fmt: skip
    data.meta_info |= {
        "micro_batch_size": MICRO_BATCH, "temperature": 1.0, "use_dynamic_bsz": True,
        "max_token_len": VERL_TOKENS, "multi_turn": False,
    }  # fmt: skip
    for name, worker in workers.items():
        logprobs, _ = worker.compute_log_prob(data, calculate_entropy=name == "policy")
        data.batch["old_log_probs" if name == "policy" else "ref_log_prob"] = logprobs
    workers["policy"].update_policy(data)
    torch.distributed.destroy_process_group()
    return calls


_VERL_UNUSED = (
    "ray", "ray.actor", "ray.util", "ray.util.placement_group", "ray.util.scheduling_strategies",
    "ray.experimental", "ray.experimental.state", "ray.experimental.state.api", "torchdata",
    "torchdata.stateful_dataloader",
)  # fmt: skip
"""What verl's modules import and the actor does not call."""


class _StandIn(ModuleType):
    """A module of whatever names, whose decorators do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn(f"{self.__name__}.{name}")

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        return arguments[0] if arguments else lambda decorated: decorated


def in_a_row(calls: Iterable[Call]) -> list[tuple[str, int, int]]:
    """Calls of the same thing in a row: its name, their number, and how much in all."""
    rows = [(name, [amount for _, amount in group]) for name, group in groupby(calls, lambda call: call[0])]
    return [(name, len(amounts), sum(amounts)) for name, amounts in rows]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m validation.rl.call_order", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the calls there")
    options = parser.parse_args(words)
    installed = [name for name in ("trl", "verl") if importlib.util.find_spec(name) is not None]
    if not installed:
        print("SKIPPED: neither TRL nor verl is installed (pip install trl)", file=sys.stderr)
        return 3
    recorded = json.loads(RECORDED.read_text())
    calls, origin = recorded["calls"], recorded["provenance"]
    for name in installed:
        cases = (
            {case: partial(calls_of, CASES[case]) for case in CASES} if name == "trl" else {VERL: verl_calls}
        )
        calls |= {case: in_a_row(run()) for case, run in cases.items()}
        origin |= provenance("python -m validation.rl.call_order")
        origin[name] = importlib.metadata.version(name)
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(rows)}" for name, rows in calls.items())
    text = f'{{"provenance": {json.dumps(origin)},\n "calls": {{\n{rows}\n}}}}\n'
    if options.out:
        options.out.write_text(text)
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
