"""Switches with other kernels or other numbers: compile, fp8, experts, dispatchers, layouts of stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import zsim
from tests.study.tune.conftest import TINY, tune
from zsim.errors import InputError
from zsim.specs.experiment.load import change_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.study.tune.axes import (
    COMPILE,
    DISPATCHER,
    DISPATCHERS,
    EXPERT,
    EXPERT_TENSOR,
    EXPERTS,
    LAYERS,
    LAYOUTS,
    PIPELINE,
    RECIPES,
    base_of,
    choices_of,
    degrees,
    even_layers,
    value_of,
)
from zsim.study.tune.framework import PRECISION, RECIPE
from zsim.study.tune.result import TuneResult, tuning_files

Tiny = Callable[..., zsim.Experiment]
# 8 layers with 8 experts of 512 x 1024 each, 2 of them for a token
MIXTURE = {
    "model_type": "mixtral", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    "vocab_size": 4096, "max_position_embeddings": 512,
}  # fmt: skip
STRUCTURE = ("replicas", "reshard", "offload", "micro-batch", "no_sync", "wrapping", "checkpointing")


def hopper(**training: Any) -> zsim.Experiment:
    """8 blocks of 4096 features on a node of H100, where products are worth 8 bits."""
    model = {**TINY, "n_embd": 4096, "n_head": 32, "n_layer": 8}
    strategy = {"kind": "fsdp2"}
    return zsim.Experiment(
        model=model, cluster="dgx-h100", nodes=1, strategy=strategy,
        training={"sequence_length": 512, "micro_batch_size": 16, **training},
    )  # fmt: skip


@pytest.fixture(scope="module")
def tuned() -> TuneResult:
    return tune(hopper(), keep=STRUCTURE, top=1)


def test_blocks_are_compiled_where_that_is_faster(tuned: TuneResult) -> None:
    best = tuned.best[0].candidate
    assert value_of(best.base, best.overrides, COMPILE) is True
    assert any(change.key == COMPILE for step in tuned.steps for change in step.changes)
    kept = tune(hopper(), keep=(*STRUCTURE, "compile"), top=1).best[0].candidate
    assert value_of(kept.base, kept.overrides, COMPILE) is False


def test_what_changes_the_numbers_stands_beside_the_best_and_never_in_it(tuned: TuneResult) -> None:
    best, other = tuned.best[0], tuned.other_numerics
    assert other is not None
    assert value_of(best.candidate.base, best.candidate.overrides, PRECISION) == "bf16"
    assert other.candidate.overrides[PRECISION] == "fp8"
    assert other.seconds < best.seconds
    said = " ".join(" ".join(tuned.lines()).split())
    recipe = other.candidate.overrides[RECIPE]
    assert f"1 with precision {recipe}, which changes what training computes" in said
    assert tuned.to_dict()["changes_numerics"]["overrides"][PRECISION] == "fp8"
    assert any(path.startswith("other-numerics/") for path in tuning_files(tuned))


def test_recipes_are_those_of_the_gpu_and_of_the_frameworks_library(make_tiny: Tiny) -> None:
    """A100 has no products in 8 bits. Megatron's layers are Transformer Engine's, and Hopper lacks mxfp8."""
    assert choices_of(RECIPES, base_of(make_tiny({"kind": "fsdp2"})), {}) == []
    labels = [choice.label for choice in choices_of(RECIPES, base_of(hopper()), {})]
    assert labels == ["precision torchao-tensorwise", "precision torchao-rowwise"]
    megatron = change_experiment(hopper(), {"strategy": {"kind": "megatron"}})
    labels = [choice.label for choice in choices_of(RECIPES, base_of(megatron), {})]
    assert labels == ["precision delayed", "precision current", "precision block"]


def mixture(**parallelism: Any) -> zsim.Experiment:
    return zsim.Experiment(
        model=MIXTURE, cluster="dgx-h100", nodes=2, strategy={"kind": "megatron"}, parallelism=parallelism,
        training={"sequence_length": 512, "gradient_accumulation_steps": 4},
    )  # fmt: skip


def test_degrees_of_a_mixture_share_the_experts() -> None:
    """8 experts on 16 GPUs: one rank, or all 8 of a node, the most that experts divide among."""
    found = dict(degrees(base_of(mixture())))
    assert {overrides[EXPERT] for overrides in found.values() if overrides[PIPELINE] == 1} == {1, 8}
    assert found["TP 2 EP 8"][EXPERT_TENSOR] == 1


def test_half_and_twice_the_ranks_of_experts_are_tried() -> None:
    base = base_of(mixture(expert=4, expert_tensor=1))
    assert [choice.overrides[EXPERT] for choice in choices_of(EXPERTS, base, {})] == [2, 8]
    assert [choice.overrides[EXPERT] for choice in choices_of(EXPERTS, base, {EXPERT: 8})] == [4]


def test_dispatchers_are_the_frameworks_where_ranks_share_experts() -> None:
    base = base_of(mixture(expert=8, expert_tensor=1))
    found = [choice.overrides[DISPATCHER] for choice in choices_of(DISPATCHERS, base, {})]
    assert found == ["all-gather", "all-to-all", "deepep", "hybridep"]
    assert choices_of(DISPATCHERS, base_of(mixture()), {}) == []


@pytest.mark.parametrize(
    ("arguments", "layers"),
    [
        ((32, 4), (8, 8, 8, 8)),
        ((32, 4, 0.0, 2.0), (8, 9, 9, 6)),  # (32 + 2) / 4 = 8.5 layers of work each, 6.5 of them on the last
        ((32, 4, 1.0, 2.0), (8, 9, 8, 7)),  # 35 / 4 = 8.75: 7.75 and 6.75 on the ends
        ((61, 16, 0.0, 1.0), (4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 3, 3, 3)),  # 62 / 16 = 3.9
        ((8, 2, 0.0, 2.0), (5, 3)),
        ((8, 1), (8,)),
    ],
)
def test_stages_have_equal_work(arguments: tuple[int, int, float, float], layers: tuple[int, ...]) -> None:
    assert even_layers(*arguments) == layers


def test_a_layout_is_tried_that_the_pipeline_takes() -> None:
    base = base_of(mixture(pipeline=2))
    (even, _) = choices_of(LAYOUTS, base, {})
    assert sum(even.overrides[LAYERS]) == 8
    assert resolve(base.experiment(even.overrides)).parallelism.layers_per_stage == even.overrides[LAYERS]
    assert choices_of(LAYOUTS, base_of(mixture()), {}) == []


def test_experts_of_several_stages_on_one_rank_are_refused() -> None:
    """With data parallelism last a stage has every second rank, but 8 ranks of experts are neighbours."""
    with pytest.raises(InputError, match="stages are on the same ranks only where the pipeline comes last"):
        resolve(mixture(pipeline=2, expert=8, expert_tensor=1, order="tp-cp-pp-dp"))
    resolve(mixture(pipeline=2, expert=8, expert_tensor=1, order="tp-cp-dp-pp"))
