"""zsim's plan of `kind = "reference"` against this repository's engine, live: the same calls, and the same
bytes before the step, in ways and worlds that nobody recorded. Rank 0 of six, the others are not there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install zsim[validate]")

import zsim  # noqa: E402
from validation import plan_check  # noqa: E402
from validation.backends import Optimization  # noqa: E402
from validation.backends.engine_backend import EngineTrainer  # noqa: E402
from validation.cases.cases import ANY_CLUSTER  # noqa: E402
from validation.llama import Llama, LlamaShape  # noqa: E402
from validation.oracle.run import fake_world  # noqa: E402
from validation.record.cases import MODELS  # noqa: E402
from validation.tracing import SILENT  # noqa: E402
from zsim.comparison.plan_check import Call, calls_of_plan  # noqa: E402
from zsim.plan.memory.tensors import bytes_before_update  # noqa: E402
from zsim.plan.ops import Device, Plan  # noqa: E402

pytestmark = pytest.mark.torch
MODEL = MODELS["uneven"]
RANKS, LENGTH = 6, 16
MB = 10**6
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# name: (keys of [strategy], keys of [training])
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stage 0": ({"stage": 0}, {}),
    "stage 0 in buckets, accumulated": (
        {"stage": 0, "bucket_bytes": 4 * MB},
        {"gradient_accumulation_steps": 2},
    ),
    "stage 1, accumulated and clipped": (
        {"stage": 1},
        {"gradient_accumulation_steps": 3, "gradient_clipping": 1.0},
    ),
    "stage 1, states in host memory": ({"stage": 1, "optimizer_place": "host"}, {}),
    "stage 2 in buckets, accumulated": (
        {"stage": 2, "bucket_bytes": 4 * MB},
        {"gradient_accumulation_steps": 2},
    ),
    "stage 2 in one bucket, clipped": ({"stage": 2, "bucket_bytes": 1000 * MB}, {"gradient_clipping": 1.0}),
    "stage 3 in bf16": ({}, {"precision": "bf16"}),
    "stage 3 in bf16, reduced in fp32": ({"reduce_dtype": "fp32"}, {"precision": "bf16"}),
    "stage 3, all resharded": ({"keep_gathered": False}, {}),
    "stage 3 without prefetch": ({"prefetch": 0, "max_reductions_in_flight": 1}, {}),
    "stage 3, three ahead, accumulated": ({"prefetch": 3}, {"gradient_accumulation_steps": 2}),
    "stage 3, checkpointed": ({}, {"activation_checkpointing": "full"}),
    "stage 3, resharded and checkpointed, two ahead": (
        {"keep_gathered": False, "prefetch": 2},
        {"activation_checkpointing": "full"},
    ),
    "stage 3 in fp16": ({}, {"precision": "fp16"}),
    "stage 3 in fp16, reduced in fp32": ({"reduce_dtype": "fp32"}, {"precision": "fp16"}),
    "stage 3, parameters in host memory, states on the device": ({"parameter_place": "host"}, {}),
    "stage 2 in buckets, states in files, accumulated": (
        {"stage": 2, "optimizer_place": "nvme", "bucket_bytes": 4 * MB},
        {"gradient_accumulation_steps": 2},
    ),
    "stage 3 in files, three ahead": (
        {"optimizer_place": "nvme", "parameter_place": "nvme", "prefetch": 3},
        {"gradient_clipping": 1.0},
    ),
    "stage 3 in host memory, accumulated": (
        {"optimizer_place": "host", "parameter_place": "host"},
        {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0},
    ),
}


def run_engine(
    strategy: dict[str, Any], training: dict[str, Any], folder: Path
) -> tuple[list[Call], dict[str, dict[str, int]]]:
    """Calls of the second step, and the bytes held when its last backward had ended."""
    shape = LlamaShape(**{key: MODEL[key] for key in LlamaShape.__dataclass_fields__ if key in MODEL})
    options = dict(strategy)
    precision = training.get("precision", "fp32")
    options["compute_dtype"] = DTYPES[precision]
    options["reduce_dtype"] = DTYPES[strategy.get("reduce_dtype", precision)]
    if precision == "fp16":
        options["loss_scale"] = 2.0**8
    if "nvme" in options.values():
        options["nvme_folder"] = folder
    micro_batches = training.get("gradient_accumulation_steps", 1)
    optimization = Optimization(
        accumulation_steps=micro_batches, gradient_clipping=training.get("gradient_clipping", 0.0)
    )
    tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
    held: dict[str, dict[str, int]] = {}
    with fake_world(RANKS):
        network = Llama(shape, checkpointing="activation_checkpointing" in training)
        trainer = EngineTrainer(network, optimization, SILENT, reduce_scatter="native", **options)
        for _ in range(2):
            trainer.engine.comm.calls.clear()
            trainer.step([(tokens, tokens)] * micro_batches, lambda: held.update(trainer.held_bytes()))
        calls = list(trainer.engine.comm.calls)
        trainer.close()
    return calls, held


def make_plan(strategy: dict[str, Any], training: dict[str, Any]) -> Plan:
    return zsim.make_plan(
        zsim.Experiment(
            model=MODEL,
            cluster=ANY_CLUSTER,
            gpus=RANKS,
            training={"precision": "fp32", "sequence_length": LENGTH, "attention": "math", **training},
            strategy={"kind": "reference", **strategy},
        )
    )


@pytest.mark.parametrize("way", WAYS)
def test_the_plan_makes_the_calls_of_the_engine_and_holds_its_bytes(way: str, tmp_path: Path) -> None:
    """Bytes in files are whole blocks, so those of the plan are fewer: not compared here."""
    strategy, training = WAYS[way]
    calls, held = run_engine(strategy, training, tmp_path)
    plan = make_plan(strategy, training)
    assert plan_check.first_difference(calls_of_plan(plan), calls) is None
    pools: dict[str, Device] = {"device": "gpu", "host": "host"}
    for place, device in pools.items():
        planned = bytes_before_update(plan, device)
        for category in ("parameters", "gradients", "optimizer_states"):
            assert planned[category] == held[place].get(category, 0), (place, category)


@pytest.mark.parametrize(
    "wrong", [{"prefetch": 0}, {"keep_gathered": False}, {"stage": 2}, {"bucket_bytes": 4 * MB}]
)
def test_a_plan_of_another_way_fails(wrong: dict[str, Any], tmp_path: Path) -> None:
    """Against stage 3 with two units gathered ahead."""
    calls, _ = run_engine({"prefetch": 2}, {}, tmp_path)
    plan = make_plan({"prefetch": 2, **wrong}, {})
    assert plan_check.first_difference(calls_of_plan(plan), calls) is not None
