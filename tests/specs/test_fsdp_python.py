"""The Python that zsim writes runs on torch's own FSDP2 and issues the plan's collectives. Needs torch."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

import zsim
from zsim.comparison.plan_check import calls_of_plan
from zsim.specs.experiment.resolve import resolve
from zsim.specs.formats.export import export_files

torch = pytest.importorskip("torch", reason="needs torch: pip install zsim[validate]")

from validation.collective_log import CollectiveLog  # noqa: E402
from validation.llama import SHAPES, Llama  # noqa: E402
from validation.oracle.run import fake_world  # noqa: E402
from validation.plan_check import first_difference  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="plans are of torch 2.13"),
]
SHAPE = replace(SHAPES["llama-tiny"], num_hidden_layers=2)
MODEL = {
    "model_type": "llama",
    "hidden_size": SHAPE.hidden_size,
    "intermediate_size": SHAPE.intermediate_size,
    "num_hidden_layers": SHAPE.num_hidden_layers,
    "num_attention_heads": SHAPE.num_attention_heads,
    "num_key_value_heads": SHAPE.num_key_value_heads,
    "vocab_size": SHAPE.vocab_size,
}


class NoOptimizer:
    """The update sends nothing."""

    def step(self) -> None: ...

    def zero_grad(self) -> None: ...


def run(strategy: dict[str, Any], **training: Any) -> tuple[list[Any], list[Any]]:
    """(the plan's collectives, torch's) of one step on 16 ranks that are not there."""
    job = resolve(
        zsim.Experiment(
            model=MODEL, cluster="dgx-h100", nodes=2, strategy=strategy,
            training={"sequence_length": 64, "precision": "bf16", **training},
        )
    )  # fmt: skip
    text = next(text for name, text in export_files(job).files.items() if name.endswith(".py"))
    written: dict[str, Any] = {}
    exec(compile(text, "written.py", "exec"), written)
    with fake_world(job.world_size):
        model = written["apply"](Llama(SHAPE, code="torchtitan"), device_type="cpu")
        tokens = torch.zeros(1, 64, dtype=torch.int64)
        batches = [tokens] * job.training.gradient_accumulation_steps
        with CollectiveLog() as log:
            written["train_step"](model, NoOptimizer(), lambda m, t: m(t, t).loss, batches)
    return calls_of_plan(zsim.make_plan(job.experiment)), log.calls


@pytest.mark.parametrize(
    ("strategy", "training"),
    [
        ({"wrapping": "torchtitan"}, {"activation_checkpointing": "full", "checkpoint_every": 2}),
        ({"wrapping": "torchtitan-0.1", "replicate": 2}, {"activation_checkpointing": "selective-op"}),
        ({"wrapping": "huggingface", "reduce_dtype": "bf16", "reshard_after_forward": False}, {}),
        ({"wrapping": "torchtitan", "no_sync": True}, {"gradient_accumulation_steps": 2}),
        ({"wrapping": "torchtitan", "reshard_after_forward": 8}, {}),
        ({"wrapping": "blocks:2"}, {"activation_checkpointing": "full"}),
        ({"wrapping": "none"}, {}),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_fsdp2_does_what_the_plan_says(strategy: dict[str, Any], training: dict[str, Any]) -> None:
    mine, theirs = run({"kind": "fsdp2", **strategy}, **training)
    assert mine
    assert first_difference(mine, theirs) is None
