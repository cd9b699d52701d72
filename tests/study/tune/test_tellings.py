"""What tune proposes exists in the program whose file was given; what takes more than files says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import zsim
from tests.study.tune.conftest import tune
from zsim.specs.experiment.load import change_experiment
from zsim.specs.experiment.programs import Program, find_config_mapping, readable_programs
from zsim.study.tune.axes import base_of, candidates, change_kind, choices_of, value_of
from zsim.study.tune.explain import file_settings, script_changes
from zsim.study.tune.framework import LOSS, Base, TunedAxis, tuning_of
from zsim.study.tune.result import tuning_files

Tiny = Callable[..., zsim.Experiment]
JSON = {
    "kind": "deepspeed",
    "config": {
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 1,
    },
    "config_name": "ds_config.json",
}


def axes_of(kind: str) -> list[TunedAxis]:
    tuning = tuning_of(kind)
    return [*tuning.structure, *tuning.details]


def labels(base: Base) -> str:
    axes = [axis for axis in axes_of(base.kind) if axis.name not in ("stage", "offload", "sharding")]
    choices = [choice for axis in axes for choice in choices_of(axis, base, {})]
    return " | ".join(choice.label for choice in choices)


def of_program(experiment: zsim.Experiment, program: Program | None) -> Base:
    return base_of(change_experiment(experiment, {"program": program}))


@pytest.mark.parametrize("program", [None, "transformers", "accelerate"])
def test_a_policy_by_op_and_every_second_block_are_not_for_the_trainer(
    make_tiny: Tiny, program: Program | None
) -> None:
    """A JSON is DeepSpeed's file even where no program names it; a stage alone is nobody's."""
    for strategy in (JSON, {"stage": 3}) if program else (JSON,):
        said = labels(of_program(make_tiny(strategy), program))
        assert "checkpointing none" in said
        assert "checkpointing full" in said
        assert "selective" not in said
        assert "every 2nd" not in said
    own = labels(base_of(make_tiny({"stage": 3})))
    assert "selective-op" in own
    assert "every 2nd block" in own


@pytest.mark.parametrize(
    ("program", "there", "absent"),
    [
        ("torchtitan", ["every 2nd", "selective-op", "cross entropy fused"],
         ["fused_linear", "reshard to", "no_sync", "wrapping huggingface"]),
        ("torchtitan-0.3", ["selective-op"], ["every 2nd", "fused_linear"]),
        ("accelerate", ["no reshard", "fused_linear"], ["selective-op", "every 2nd", "reshard to"]),
        (None, ["every 2nd", "selective-op", "fused_linear", "reshard to", "wrapping huggingface"], []),
    ],
)  # fmt: skip
def test_each_program_is_proposed_what_it_has(
    make_tiny: Tiny, program: Program | None, there: list[str], absent: list[str]
) -> None:
    said = labels(of_program(make_tiny({"kind": "fsdp2"}), program))
    assert [word for word in there if word not in said] == []
    assert [word for word in absent if word in said] == []


def test_what_the_file_has_may_stay(make_tiny: Tiny) -> None:
    """A script that keeps by op already can go on doing so."""
    made = make_tiny(JSON, activation_checkpointing="selective-op")
    said = labels(base_of(made))
    assert "selective-op" in said
    assert "every 2nd" not in said


@pytest.mark.parametrize("program", readable_programs())
def test_nothing_that_is_proposed_is_unknown_to_the_table(make_tiny: Tiny, program: Program) -> None:
    for kind in ("ddp", "fsdp1", "fsdp2", "deepspeed"):
        base = change_kind(of_program(make_tiny({"stage": 3}), program), kind)
        for axis in axes_of(kind):
            for choice in choices_of(axis, base, {}):
                for key, value in choice.overrides.items():
                    is_told = find_config_mapping(base.program, base.kind, key, value) is not None
                    assert is_told or value == value_of(base, {}, key), (kind, key, value)


def test_what_takes_a_change_of_the_script_is_marked_everywhere(make_tiny: Tiny) -> None:
    """A JSON says nothing of compiled blocks: the table, the change, the JSON, the notes beside the files and
    the page say that they are the script's."""
    made = make_tiny({**JSON, "config_name": "ds_config.json"}, activation_checkpointing="full")
    result = tune(made, keep=("stage", "offload", "hpZ", "micro-batch"), top=1)
    best = result.best[0]
    asked = list(script_changes(best.candidate))
    assert asked
    text = " ".join(" ".join(result.lines()).split())
    assert f"needs a change of the script: {asked[0]}" in text
    content = result.to_dict()
    assert content["best"][0]["script_changes"] == asked
    changes = [change for step in content["steps"] for change in step["changes"]]
    assert any(change["script_change"] for change in changes)
    notes = " ".join(tuning_files(result)["best/NOTES.txt"].split())
    assert f"- needs a change of the script: {asked[0]}" in notes
    assert "needs a change of the script" in result.page()


def test_what_the_file_says_is_no_change_of_the_script(make_tiny: Tiny) -> None:
    """The Trainer's own file has a key for the loss, which the notes name."""
    made = change_experiment(make_tiny(JSON, activation_checkpointing="full"), {"program": "transformers"})
    space = candidates([base_of(made)])
    candidate = next(one for one in space if one.overrides[LOSS] == "fused_linear")
    assert list(script_changes(candidate)) == []
    (said,) = [text for text in file_settings(candidate) if "training.cross_entropy" in text]
    assert said.startswith(
        "the Trainer is told training.cross_entropy = fused_linear by use_liger_kernel: true"
    )


def test_another_strategy_than_the_files_is_said_to_be_one(make_tiny: Tiny) -> None:
    base = change_kind(base_of(make_tiny(JSON)), "fsdp2")
    (candidate, *_) = candidates([base])
    (first, *_) = script_changes(candidate)
    assert first == "strategy.kind = fsdp2: another strategy than DeepSpeed's file has"


def test_a_configuration_with_better_odds_stands_before_a_given_one_that_may_not_fit() -> None:
    """28 sequences of GPT-2 leave little of 40 GB. 14 twice take 4 % longer, and fit."""
    given = zsim.Experiment(
        model="gpt2", cluster="dgx-a100-40gb", gpus=1, strategy={"kind": "ddp"},
        training={"sequence_length": 1024, "micro_batch_size": 28},
    )  # fmt: skip
    tuning = tune(given, keep=["checkpointing", "compile", "cross-entropy"], jobs=1)
    verdict = tuning.given_verdict
    assert verdict is not None
    assert 0.5 < verdict.probability < 0.9
    assert tuning.best[0].relative_odds == 1.0
    assert tuning.given is not None
    assert tuning.best[0].seconds > tuning.given.seconds
    (step,) = tuning.steps
    assert {change.key: change.after for change in step.changes} == {
        "training.micro_batch_size": 14, "training.gradient_accumulation_steps": 2
    }  # fmt: skip
    assert "4.5 % more, but it fits with better odds" in "\n".join(tuning.lines())
