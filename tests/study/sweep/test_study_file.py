"""Study files: what they may say, the points that follow, and what is wrong with them."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from zsim.errors import InputError
from zsim.study.sweep.points import Point, study_points
from zsim.study.sweep.records import point_record
from zsim.study.sweep.study_file import load_study, study_from

BASE = 'base = {model = "gpt2", cluster = "dgx-h100"}\n'


def points(text: str, **overrides: Any) -> list[Point]:
    return study_points(study_from(tomllib.loads(text), folder=Path(), overrides=overrides))


def values(text: str, *keys: str) -> list[tuple[Any, ...]]:
    return [tuple(point.values[key] for key in keys) for point in points(text)]


def refused(words: str, text: str, **overrides: Any) -> None:
    with pytest.raises(InputError, match=words):
        points(text, **overrides)


def test_another_programs_name_of_a_parallelism_is_answered_with_the_key() -> None:
    text = BASE + "[axes]\nstrategy.tensor_parallel = [1, 8]\n"
    refused(r"strategy\.tensor_parallel: unknown key; it is parallelism\.tensor here", text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            BASE + '[axes]\n"gpu.power_limt" = [300, 400]\n',
            "study: gpu.power_limt: unknown key 'power_limt'; did",
        ),
        (BASE + '[axes]\n"cluster.power_limit" = [300, 400]\n', "; did you mean 'gpu.power_limit'?"),
        (
            'base = {model = "gpt2", cluster = {extends = "dgx-h100", gpu = {power_limt = 300}}}\n'
            "[axes]\nnodes = [1, 2]\n",
            "study: cluster.gpu.power_limt: unknown key 'power_limt'; did you mean 'power_limit'?",
        ),
        (BASE + "[axes]\nnodes = [1, 2]\n[[set]]\ncluster.nic.bandwith = 1\n", "did you mean 'bandwidth'?"),
        (BASE + "[axes]\nmodel.n_layr = [1, 2]\n", "study: model.n_layr: says nothing about the shape of"),
        (BASE + "[axes]\nfaults.lnks = [1, 2]\n", "study: faults: unknown key 'lnks'; did you mean 'links'?"),
    ],
)
def test_what_is_wrong_at_every_point_is_said_once_before_any(text: str, words: str) -> None:
    """Misspelt keys of the hardware failed point by point, after each had been started."""
    refused(re.escape(words), text)


# -- axes ------------------------------------------------------------------------------------------------


def test_a_grid_is_every_combination_the_last_axis_fastest() -> None:
    text = BASE + "[axes]\nnodes = [1, 2]\ntraining.micro_batch_size = [1, 4]\n"
    assert values(text, "nodes", "training.micro_batch_size") == [(1, 1), (1, 4), (2, 1), (2, 4)]


def test_what_the_trainer_does_is_an_axis_whose_keys_are_known() -> None:
    text = BASE + "[axes]\ntrainer.metrics_per_micro_batch = [0, 2]\nsimulation.every_micro_batch = [false]\n"
    assert values(text, "trainer.metrics_per_micro_batch") == [(0,), (2,)]
    refused("unknown key 'vary'; expected one of .*axes", BASE + "[vary]\nnodes = [1, 2]\n")
    refused("unknown key 'trainer.metrics'", BASE + "[axes]\ntrainer.metrics = [0, 2]\n")


def test_zipped_axes_go_together() -> None:
    text = BASE + '[axes]\nnodes = [1, 2]\n[[zip]]\nlabel = ["a", "b"]\ntraining.micro_batch_size = [1, 8]\n'
    found = values(text, "nodes", "label", "training.micro_batch_size")
    assert found == [(1, "a", 1), (1, "b", 8), (2, "a", 1), (2, "b", 8)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{ from = 1, to = 16, factor = 2 }", [1, 2, 4, 8, 16]),
        ("{ from = 2, to = 9, step = 3 }", [2, 5, 8]),
        ("{ from = 3, to = 100, factor = 4 }", [3, 12, 48]),
    ],
)
def test_ranges_are_written_short(text: str, expected: list[int]) -> None:
    assert [row[0] for row in values(f"{BASE}[axes]\nnodes = {text}\n", "nodes")] == expected


def test_every_point_is_an_experiment() -> None:
    text = BASE + '[axes]\nstrategy.stage = [1, 3]\n"strategy.config.bf16.enabled" = [true]\n'
    first, second = points(text)
    assert first.experiment is not None
    assert second.experiment is not None
    assert first.experiment.strategy.config["zero_optimization"] == {"stage": 1}  # type: ignore[attr-defined]
    assert second.experiment.strategy.config["zero_optimization"] == {"stage": 3}  # type: ignore[attr-defined]


def test_a_whole_table_may_vary() -> None:
    text = BASE + '[axes]\nstrategy = [{kind = "ddp"}, {stage = 2}]\n'
    assert [p.experiment and p.experiment.strategy.kind for p in points(text)] == ["ddp", "deepspeed"]


def test_a_combination_that_is_no_experiment_is_a_point_with_its_error() -> None:
    text = BASE + "[axes]\ntraining.micro_batch_size = [1, 0]\n"
    good, bad = points(text)
    assert good.error is None
    assert bad.experiment is None
    assert "training.micro_batch_size: found 0" in (bad.error or "")


# -- conditions and rules --------------------------------------------------------------------------------


def test_where_keeps_points() -> None:
    text = 'where = "nodes * training.micro_batch_size == 4"\n' + BASE
    text += "[axes]\nnodes = [1, 2, 4]\ntraining.micro_batch_size = [1, 2, 4]\n"
    assert values(text, "nodes", "training.micro_batch_size") == [(1, 4), (2, 2), (4, 1)]


def test_where_knows_gpus_by_nodes_nodes_by_gpus_and_defaults() -> None:
    """A DGX H100 has 8 GPUs; activation checkpointing is "none" where nothing is said."""
    text = 'where = ["gpus == 16", "training.activation_checkpointing == \'none\'"]\n' + BASE
    assert values(text + "[axes]\nnodes = [1, 2, 4]\n", "nodes") == [(2,)]
    text = 'where = "nodes == 2"\n' + BASE
    assert values(text + "[axes]\ngpus = [8, 16, 32]\n", "gpus") == [(16,)]


def test_nodes_that_are_no_number_are_the_error_of_a_point_also_beside_a_condition_on_them() -> None:
    """`nodes = { from = 1 }` in the base, which takes no ranges; beside a rule that reads them."""
    base = '[base]\nmodel = "gpt2"\ncluster = "dgx-h100"\nnodes = { from = 1 }\n'
    rule = "[[set]]\nwhen = \"label == 'a' and nodes > 1\"\ntraining.compile = true\n"
    [point] = points(base + '[axes]\nlabel = ["a"]\n' + rule)
    assert point.experiment is None


def test_rules_set_what_follows_from_the_rest() -> None:
    """1,024 sequences in all: 128 micro-steps of one on 8 GPUs, 64 on 16; checkpointing from 16 on."""
    text = BASE + "[axes]\nnodes = [1, 2]\n[[set]]\n"
    text += '"training.gradient_accumulation_steps" = { value = "1024 // gpus" }\n'
    text += '[[set]]\nwhen = "training.gradient_accumulation_steps < 100"\n'
    text += 'training.activation_checkpointing = "full"\n'
    found = [point.experiment.training for point in points(text) if point.experiment is not None]
    assert [t.gradient_accumulation_steps for t in found] == [128, 64]
    assert [t.activation_checkpointing for t in found] == ["none", "full"]


def test_rules_may_read_the_label_of_a_zip() -> None:
    text = BASE + '[[zip]]\nlabel = ["a", "b"]\nnodes = [1, 2]\n'
    text += "[[set]]\nwhen = \"label == 'b'\"\ntraining.compile = true\n"
    assert [p.experiment and p.experiment.training.compile for p in points(text)] == [False, True]


# -- files -----------------------------------------------------------------------------------------------


def test_paths_in_a_study_are_relative_to_it(tmp_path: Path) -> None:
    """The experiment's file names a DeepSpeed JSON beside itself, an axis two beside the study."""
    (tmp_path / "inner").mkdir()
    for place, stage in (("inner/ds.json", 1), ("two.json", 2), ("three.json", 3)):
        (tmp_path / place).write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    (tmp_path / "inner" / "e.toml").write_text(
        'model = "gpt2"\ncluster = "dgx-h100"\n[strategy]\nkind = "deepspeed"\nconfig = "ds.json"\n'
    )
    study = tmp_path / "study.toml"
    study.write_text('experiment = "inner/e.toml"\n[axes]\nnodes = [1]\n')
    (point,) = study_points(load_study(study))
    assert point.experiment is not None
    assert point.experiment.strategy.config == str(tmp_path / "inner" / "ds.json")  # type: ignore[attr-defined]
    study.write_text('experiment = "inner/e.toml"\n[axes]\nstrategy.config = ["two.json", "three.json"]\n')
    found = [p.experiment.strategy.config for p in study_points(load_study(study)) if p.experiment]  # type: ignore[attr-defined]
    assert found == [str(tmp_path / "two.json"), str(tmp_path / "three.json")]


def test_base_changes_the_experiment_and_overrides_change_both(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text('model = "gpt2"\ncluster = "dgx-h100"\n[training]\ncompile = true\n')
    study = tmp_path / "s.toml"
    study.write_text(
        'experiment = "e.toml"\n[base]\nmodel = "llama-3-8b"\ntraining = {precision = "fp16"}\n'
        "[axes]\nnodes = [1]\n"
    )
    (point,) = study_points(load_study(study, {"training.micro_batch_size": 3}))
    assert point.experiment is not None
    training = point.experiment.training
    assert (training.compile, training.precision, training.micro_batch_size) == (True, "fp16", 3)
    assert point.experiment.model == "llama-3-8b"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (r"unknown key 'axis'; did you mean 'axes'", BASE + "[axis]\nnodes = [1]\n"),
        (
            r"unknown key 'model': it belongs to the experiment; expected experiment = \"FILE\", or the "
            r"experiment's keys in the table \[base\]",
            'model = "gpt2"\ncluster = "dgx-h100"\n[axes]\nnodes = [1]\n',
        ),
        (r"unknown key 'strategy': it belongs", BASE + "[strategy]\nstage = 3\n[axes]\nnodes = [1]\n"),
        (r"path of an experiment file, or the table \[base\]", '[experiment]\nmodel = "gpt2"\n'),
        (r"nothing varies; expected \[axes\] or \[\[zip\]\]", BASE),
        (r"what to vary\? expected 'experiment' \(a file\), or \[base\]", "[axes]\nnodes = [1]\n"),
        (r"axes: nodes: found 3, expected a list of values", BASE + "[axes]\nnodes = 3\n"),
        (r"axes: nodes: found \[\], expected a list", BASE + "[axes]\nnodes = []\n"),
        (r"from 4 to 1 by 2 never gets there", BASE + "[axes]\nnodes = {from = 4, to = 1, step = 2}\n"),
        (r"from 1 to 4 by 1 never gets there", BASE + "[axes]\nnodes = {from = 1, to = 4, factor = 1}\n"),
        (r"'nodes' varies twice", BASE + "[axes]\nnodes = [1]\n[[zip]]\nnodes = [2]\n"),
        (r"zip 1: 'gpus' has 1 values and 'label' 2", BASE + '[[zip]]\nlabel = ["a", "b"]\ngpus = [8]\n'),
        (r"set 1: sets nothing", BASE + "[axes]\nnodes = [1]\n[[set]]\nwhen = \"nodes > 1\"\n"),
        (r"where: 'gpu > 1': unknown key 'gpu'; did you mean 'gpus'",
         'where = "gpu > 1"\n' + BASE + "[axes]\nnodes = [1]\n"),
        (r"'where' keeps none of 1 combinations", 'where = "nodes > 1"\n' + BASE + "[axes]\nnodes = [1]\n"),
        (r"4,000,000 combinations, expected at most 1,000,000",
         BASE + "[axes]\nnodes = {from = 1, to = 2000, step = 1}\ngpus = {from = 1, to = 2000, step = 1}\n"),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_their_place(words: str, text: str) -> None:
    refused(words, text)


def test_an_axis_cannot_be_set_from_outside_too() -> None:
    refused(r"--set nodes: is an axis of study", BASE + "[axes]\nnodes = [1, 2]\n", nodes=3)


def test_the_study_of_the_documentation_runs_as_written() -> None:
    """2 checkpointings x 4 counts of nodes (1, 4, 16, 64) x 2 cards x 3 strategies, all within 4,096."""
    page = (Path(__file__).parents[3] / "docs" / "studies.md").read_text()
    found = points(page.split("```toml\n")[1].split("```")[0])
    assert len(found) == 48
    assert [point.error for point in found if point.error] == []
    hybrid = [p.experiment for p in found if p.values["label"] == "HSDP" and p.values["nodes"] == 16]
    assert {experiment.strategy.replicate for experiment in hybrid if experiment} == {16}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("key", "value", "row"),
    [
        ("cluster.nvme.drives", 16, "fits"),
        ("faults.slow_gpus.3", 1.5, "step_seconds"),
        ("cost.gpu_hour_price", 2.0, "cost.money_per_billion_tokens"),
    ],
)
def test_drives_stragglers_and_prices_are_axes(key: str, value: Any, row: str) -> None:
    """A slow GPU among 8 makes the step longer, a price makes it cost."""
    text = f'{BASE}[base.training]\nsequence_length = 256\n[axes]\ngpus = [8]\n"{key}" = [{value}]\n'
    (point,) = points(text.replace('base = {model = "gpt2", cluster = "dgx-h100"}', '[base]\nmodel = "gpt2"\n'
                                   'cluster = "dgx-h100"'))  # fmt: skip
    assert point.experiment is not None
    record = point_record("x", point.experiment)
    assert (record["status"], record["error"]) == ("ok", None)
    assert record["row"][row]
