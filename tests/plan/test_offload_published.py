"""Published steps with CPU-Adam: Llama-3.1-8B on 8 H200 from 8k to 256k tokens, and GPT-2 10B on one V100."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zsim import Experiment
from zsim.cost.compute import with_attention_variant
from zsim.engine.simulate import simulate_job
from zsim.specs.job import Job, resolve
from zsim.study.published_model import with_fused_loss

CPU = {"device": "cpu"}

# Tokens per sequence -> seconds (training_runs.csv, stas00-h200-b200-0001 to 0011, H200; role calibrate)
H200 = {8192: 2.9904, 32768: 7.1602, 65536: 16.1858, 131072: 46.2207, 196608: 93.0146, 262144: 157.1528}


def h200_job(tokens: int, optimizer_fraction: float | None = None) -> Job:
    """DeepSpeed 0.19.2, ZeRO-3, optimizer on the CPU, pinned; FlashAttention 3, Liger's kernels and loss,
    full checkpointing. The CPU is not stated."""
    zero = {"stage": 3, "offload_optimizer": {**CPU, "pin_memory": True}}
    config = {"bf16": {"enabled": True}, "zero_optimization": zero}
    training = {
        "sequence_length": tokens, "micro_batch_size": 1, "activation_checkpointing": "full", "compile": True,
    }  # fmt: skip
    job = resolve(
        Experiment(
            model="llama-3.1-8b", cluster="hgx-h200", nodes=1, training=training,
            strategy={"kind": "deepspeed", "config": config, "version": "0.19.2"},
        )
    )  # fmt: skip
    cluster = job.cluster.model_copy(update={"gpu": with_attention_variant(job.cluster.gpu, "flash3")})
    if optimizer_fraction is not None:
        changed = {"optimizer_fraction": optimizer_fraction, "copy_fraction": optimizer_fraction}
        cluster = cluster.model_copy(update={"offload": cluster.offload.model_copy(update=changed)})
    return replace(job, model=with_fused_loss(job.model), cluster=cluster)


@pytest.mark.parametrize("tokens", sorted(H200))
def test_eight_h200_with_cpu_adam(tokens: int) -> None:
    """One constant, the CPU's fraction of memory bandwidth, is fitted, and only the shortest row feels it:
    the others are predictions, within 5 %."""
    seconds = simulate_job(h200_job(tokens)).trace.step_seconds
    assert seconds == pytest.approx(H200[tokens], rel=0.05)


def test_only_the_shortest_row_tells_the_cpus_rate() -> None:
    """Half of the rate again moves 8k tokens by a fifth and 128k by 2 %."""
    for tokens, least, most in ((8192, 0.10, 0.30), (131072, 0.0, 0.02)):
        base, fast = (simulate_job(h200_job(tokens, f)).trace.step_seconds for f in (0.35, 0.525))
        assert least < base / fast - 1 < most


def test_the_zero_offload_tutorial_on_one_v100() -> None:
    """25.87 s for GPT-2 with 10.28B parameters, micro-batch 10, of which the CPU took 7.6 to 8.0
    (ds-tutorial-zero-offload-0001). Predicted 12 % short, in forward and backward: the fp16 kernels of 2020,
    attention written out, are not calibrated. What follows the backward is 10 s, because since then scaling,
    casting and the copy to the GPU no longer overlap with the CPU's update."""
    model: dict[str, Any] = {
        "model_type": "gpt2", "n_embd": 4096, "n_layer": 50, "n_head": 32, "n_positions": 1024,
        "vocab_size": 50257,
    }  # fmt: skip
    zero = {"stage": 2, "offload_optimizer": CPU, "overlap_comm": True}
    experiment = Experiment(
        model=model, cluster="dgx-2", gpus=1,
        training={"sequence_length": 1024, "micro_batch_size": 10, "activation_checkpointing": "full",
                  "attention": "math"},
        strategy={"kind": "deepspeed", "config": {"fp16": {"enabled": True}, "zero_optimization": zero}},
    )  # fmt: skip
    seconds = simulate_job(resolve(experiment)).trace.step_seconds
    assert seconds == pytest.approx(25.87, rel=0.15)
