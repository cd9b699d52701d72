"""Megatron's overlap of experts' exchanges with another micro-batch: the order, and on which stream.

Expectations are those of `TransformerLayerSchedulePlan.run` and `combined_1f1b_schedule_for_no_pipelining`
(Megatron-LM d98e8a64 megatron/core/models/common/model_chunk_schedule_plan.py,
megatron/core/pipeline_parallel/combined_1f1b.py).
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest

from tests.plan.pipeline.runtimes import megatron_settings, steps_of
from zsim.engine.simulate import simulate_job
from zsim.errors import InputError
from zsim.plan.actions import Action, Overlap
from zsim.plan.make import make_plan
from zsim.plan.memory.tensors import device_peaks
from zsim.plan.ops import Kernels, Op, Plan
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

LAYERS = 2
MODEL: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 1024, "intermediate_size": 512, "moe_intermediate_size": 512,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 1024, "num_experts": 16, "num_experts_per_tok": 4, "tie_word_embeddings": False,
}  # fmt: skip
COMPUTE, EXCHANGES = "compute", "expert exchanges"


def experiment_of(
    *, overlaps: bool = True, delays: bool = False, micro_batches: int = 2, **keys: Any
) -> Experiment:
    return Experiment(
        model={**MODEL, **keys.pop("model", {})},
        cluster="dgx-h100",
        gpus=keys.pop("gpus", 8),
        training={
            "sequence_length": 2048, "gradient_accumulation_steps": micro_batches, **keys.pop("training", {})
        },
        strategy={
            "kind": "megatron", "moe_grouped_gemm": True, "moe_permute_fusion": True,
            "overlap_expert_parallel": overlaps, "delay_wgrad_compute": delays, **keys.pop("strategy", {}),
        },
        parallelism={"expert": 8, "dispatcher": "all-to-all", **keys},
    )  # fmt: skip


def plan_of(**keys: Any) -> Plan:
    return make_plan(resolve(experiment_of(**keys)))


def node_of(op: Op) -> tuple[str, str, str]:
    """Stream, phase and what of a layer it is: attention ("first"), exchange, experts, weights."""
    name = op.name
    if "all_to_all" in name or ("residual" in name and "mlp" in name) or "unpermute" in name:
        what = "exchange"
    elif name.endswith("backward weight") or name.startswith("add gradient"):
        what = "weights"
    elif "experts" in name and not any(one in name for one in (".permute", "counts")):
        what = "experts"
    else:
        what = "first"
    return op.stream, op.phase, what


def nodes(plan: Plan, *, pair: int = 0) -> list[tuple[str, str, str]]:
    """What runs between the last backward kernel of the loss's side and the end of the pair's layers."""
    ops = [op for op in plan.programs[0].ops if op.work is not None]
    heads = [n for n, op in enumerate(ops) if op.name == "model.norm backward"]
    ops = ops[heads[pair] + 1 :]
    end = next(n for n, op in enumerate(ops) if op.name == "model.norm")
    inside = [op for op in ops[:end] if "layers" in op.name]
    return [key for key, _ in groupby(node_of(op) for op in inside)]


def test_a_layer_of_either_side_in_megatrons_order() -> None:
    one = [
        (EXCHANGES, "backward", "exchange"),
        (COMPUTE, "forward", "first"),
        (COMPUTE, "backward", "experts"),
        (EXCHANGES, "forward", "exchange"),
        (COMPUTE, "backward", "weights"),
        (EXCHANGES, "backward", "exchange"),
        (COMPUTE, "forward", "experts"),
        (EXCHANGES, "forward", "exchange"),
        (COMPUTE, "backward", "first"),
        (COMPUTE, "backward", "weights"),
    ]
    assert nodes(plan_of(delays=True)) == one * LAYERS


def test_without_delay_weights_come_with_their_modules() -> None:
    plan = plan_of()
    names = [op.name for op in plan.programs[0].ops if op.phase == "backward"]
    assert not any(name.endswith("backward weight") for name in names)


@pytest.mark.parametrize("dispatcher", ["all-to-all", "deepep", "hybridep"])
def test_an_exchange_waits_for_its_own_side_alone(dispatcher: str) -> None:
    """Forward's dispatch waits for its router's side, backward's for its experts, never for the other's."""
    plan = plan_of(dispatcher=dispatcher, micro_batches=3)
    ops = plan.programs[0].ops
    first = [op for op in ops if op.stream == EXCHANGES and op.after]
    assert first
    for op in first:
        kernels = [ops[number] for number in op.after if isinstance(ops[number].work, Kernels)]
        is_head = any("layers" not in one.name for one in kernels)
        assert is_head or {one.phase for one in kernels} <= {op.phase}


def test_all_work_is_there_once() -> None:
    """Pairs reorder: of each name as many ops as one after the other, and the same bytes at the peak but for
    a second micro-batch's activations."""
    paired, plain = plan_of(micro_batches=3), plan_of(overlaps=False, micro_batches=3)
    programs = [plan.programs[0] for plan in (paired, plain)]
    names = [sorted(op.name for op in one.ops if op.work is not None) for one in programs]
    assert names[0] == names[1]
    peaks = [device_peaks(one)["gpu"] for one in programs]
    assert peaks[0] > peaks[1]


def test_without_a_pipeline_every_backward_runs_beside_the_next_forward() -> None:
    settings = megatron_settings(overlap_expert_parallel=True)
    (steps,) = steps_of("megatron", "1f1b", 1, 1, 3, settings=settings)
    pairs = [Overlap(Action("F", 0, n + 1), Action("B", 0, n)) for n in range(2)]
    assert steps == [Action("F", 0, 0), *pairs, Action("B", 0, 2)]


@pytest.mark.parametrize("overlaps_p2p", [True, False])
def test_with_a_pipeline_one_forward_more_is_ahead(overlaps_p2p: bool) -> None:
    """4 ranks, 2 chunks, 8 micro-batches: 2 (ranks - 1 - rank) + (chunks - 1) ranks + 1 forwards ahead."""
    settings = megatron_settings(overlap_expert_parallel=True, overlap_p2p=overlaps_p2p)
    for rank, steps in enumerate(steps_of("megatron", "interleaved-1f1b", 4, 2, 8, settings=settings)):
        computed = [one for one in steps if isinstance(one, Overlap) or one[0] in ("F", "B")]
        ahead = 2 * (3 - rank) + 4 + 1
        kinds = ["F"] * ahead + ["pair"] * (16 - ahead) + ["B"] * ahead
        assert ["pair" if isinstance(one, Overlap) else one[0] for one in computed] == kinds


def test_a_pipeline_of_pairs_runs_and_hides_exchanges() -> None:
    """The engine meets no deadlock; with kernels that outlast the host the step is shorter than one after the
    other."""
    keys: dict[str, Any] = {
        "gpus": 16, "pipeline": 2, "virtual_stages": 2, "micro_batches": 4, "delays": True,
        "model": {"num_hidden_layers": 8, "hidden_size": 4096},
    }  # fmt: skip
    spans = []
    for overlaps in (True, False):
        long = {"sequence_length": 16384}
        found = {
            **keys,
            "overlaps": overlaps,
            "delays": overlaps,
            "model": dict(keys["model"]),
            "training": long,
        }
        spans.append(simulate_job(resolve(experiment_of(**found))).trace.to_frame()["end_seconds"].max())
    assert spans[0] < 0.97 * spans[1]


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"dispatcher": "all-gather"}, "all-to-all"),
        ({"expert": 1, "dispatcher": None}, "expert = 1"),
        ({"gpus": 16, "pipeline": 2}, "virtual_stages"),
        ({"training": {"activation_checkpointing": "full"}}, "activation_checkpointing"),
        (
            {"training": {"activation_checkpointing": "selective", "recompute_modules": ["moe"]}},
            "recompute_modules",
        ),
        ({"overlaps": False, "delays": True}, "overlap_expert_parallel"),
    ],
)
def test_what_megatron_refuses(keys: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        plan_of(**keys)
