"""zsim's phases, passes and bytes of a sync, against what TRL's trainer calls with an engine that counts, and
its micro-batches against verl's actor."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from validation.rl import call_order
from validation.rl.call_order import (
    CASES,
    MICRO_BATCH,
    MODEL,
    PROMPT_TOKENS,
    PROMPTS,
    RESPONSE_TOKENS,
    SAMPLES,
    UPDATES,
    VERL,
    VERL_LENGTHS,
    VERL_MINI_BATCH,
    VERL_TOKENS,
    calls_of,
    in_a_row,
    verl_calls,
)
from zsim.engine.simulator import Simulator
from zsim.specs.experiment.tables import Experiment
from zsim.workflows.rl.job import resolve_rl
from zsim.workflows.rl.phases import model_bytes, num_tensors, phase_times

RECORDED = json.loads((Path(call_order.__file__).parent / "call_orders.json").read_text())["calls"]


def simulated_calls(settings: dict[str, Any]) -> list[list[Any]]:
    """The calls of a step as zsim has them: name, number, and bytes, samples or tokens in all."""
    is_split, sleeps = settings["vllm_mode"] == "server", settings.get("vllm_enable_sleep_mode", False)
    lengths = {
        "prompt": {"law": "constant", "mean": PROMPT_TOKENS},
        "response": {"law": "constant", "mean": RESPONSE_TOKENS},
        "max_response": RESPONSE_TOKENS + 1,
    }
    table = {
        "framework": "trl", "placement": "split" if is_split else "colocated", "prompts_per_step": PROMPTS,
        "samples_per_prompt": SAMPLES, "mini_batch_samples": PROMPTS * SAMPLES // UPDATES,
        "reference": "resident" if settings["beta"] else "none", "lengths": lengths,
        "offload": {"sleep_level": 2 if sleeps else 0},
    }  # fmt: skip
    job = resolve_rl(
        Experiment(
            model=MODEL, cluster="dgx-h100", gpus=2 if is_split else 1, strategy={"kind": "ddp"},
            training={"sequence_length": 32, "micro_batch_size": MICRO_BATCH}, rl=table,
        ),
        Simulator(),
    )  # fmt: skip
    padded = MICRO_BATCH * job.update.sample_tokens
    passes = job.whole_pass.micro_batches, padded * job.whole_pass.micro_batches
    update = job.update.micro_batches, padded * job.update.micro_batches
    return [
        ["weight_sync", num_tensors(job.update_job.model), model_bytes(job)],
        ["rollout", 1, job.num_samples],
        *([["old_logprobs", *passes]] if job.recomputes_logprobs else []),
        *([["reference", *passes]] if job.has_reference else []),
        *[["training", *update], ["update", 1, 0]] * job.updates,
    ]


@pytest.mark.parametrize("name", CASES)
def test_a_step_has_the_calls_of_the_package(name: str) -> None:
    """Weights in fp32 tensor by tensor, one rollout, a pass of each kind over all samples, two updates. What
    is put to sleep and woken has no tensors."""
    calls = [call for call in RECORDED[name] if not call[0].startswith(("sleep", "wake"))]
    assert calls == simulated_calls(dict(CASES[name]))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl: pip install trl")
def test_the_package_still_makes_the_calls_of_the_file(name: str) -> None:
    assert [list(row) for row in in_a_row(calls_of(CASES[name]))] == RECORDED[name]


def test_micro_batches_by_tokens_are_those_of_verls_actor() -> None:
    """68 tokens with room for 12 are six micro-batches, though no two samples fit one."""
    responses = [tokens - PROMPT_TOKENS for tokens in VERL_LENGTHS]
    lengths = {
        "prompt": {"law": "constant", "mean": PROMPT_TOKENS}, "response": {"values": responses},
        "correlation": 0.0, "max_response": max(responses),
    }  # fmt: skip
    table = {
        "framework": "verl", "prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES,
        "mini_batch_samples": VERL_MINI_BATCH, "micro_batch_tokens": VERL_TOKENS, "reference": "resident",
        "rollout": {"tensor": 1}, "lengths": lengths,
    }  # fmt: skip
    training = {"sequence_length": VERL_TOKENS + 1, "micro_batch_size": 1}
    asked = Experiment(
        model=MODEL, cluster="dgx-h100", gpus=1, strategy={"kind": "fsdp2"}, training=training, rl=table
    )
    job = resolve_rl(asked, Simulator())
    whole = [job.whole_pass.micro_batches, job.whole_pass.total_tokens]
    assert [["old_logprobs", *whole], ["reference", *whole]] == RECORDED[VERL][:2]
    updates = [["training", job.update.micro_batches], ["update", 1]] * job.updates
    assert updates == [call[:2] for call in RECORDED[VERL][2:]]


@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl: pip install verl")
def test_verl_still_makes_the_calls_of_the_file() -> None:
    assert [list(row) for row in in_a_row(verl_calls())] == RECORDED[VERL]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_base_of_adapters_is_sent_as_it_is_stored(kind: str) -> None:
    """Adapters in fp32 beside a frozen base in 16 bits. The passes without backward are simulated too, whose
    casts nothing keeps."""
    simulator = Simulator()
    job = resolve_rl(
        Experiment(
            model=MODEL,
            cluster="dgx-h100",
            gpus=8,
            strategy={"kind": kind},
            training={
                "sequence_length": 32,
                "micro_batch_size": 1,
                "stored_dtype": "fp32",
                "lora": {"rank": 8},
                "frozen_dtype": "bf16",
            },
            rl={
                "framework": "trl",
                "prompts_per_step": 16,
                "samples_per_prompt": 4,
                "lengths": {"prompt": {"mean": 4}, "response": {"mean": 8}, "max_response": 16},
            },
        ),
        simulator,
    )
    model = job.update_job.model
    adapters = sum(p.numel for _, p in model.named_parameters() if p.trainable)
    assert model_bytes(job) == 4 * adapters + 2 * (model.numel - adapters)
    assert phase_times(job, simulator).old_logprobs > 0
