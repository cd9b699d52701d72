"""What is wrong with a file is said at once: experiments, studies, DeepSpeed's JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from zsim.errors import InputError
from zsim.specs.experiment.load import load_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.study.sweep.study_file import load_study


def said(error: pytest.ExceptionInfo[InputError]) -> list[str]:
    """What is before the first problem, then each; in one paragraph."""
    assert "\n" not in str(error.value)
    return re.split(r";? \(\d+\) ", str(error.value))


def test_an_experiments_problems_are_listed_those_of_its_strategy_too(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        'model = "gpt2"\ncluster = "dgx-h100"\nnodez = 2\n[training]\nsequence_lenth = 5\n'
        'precision = "bf15"\n[strategy]\nkind = "fsdp2"\nreplicat = 2\nstage = 3\n'
    )
    with pytest.raises(InputError) as error:
        load_experiment(path)
    assert said(error) == [
        "job.toml: 5 problems:",
        "strategy: unknown key 'replicat'; did you mean 'replicate'?",
        "strategy.stage does not belong to kind 'fsdp2'; it is a key of deepspeed and reference",
        "training: unknown key 'sequence_lenth'; did you mean 'sequence_length'?",
        "unknown key 'nodez'; did you mean 'nodes'?",
        "training.precision: found 'bf15', expected 'bf16', 'fp16', 'fp32' or 'fp8'; did you mean 'bf16'?",
    ]


def test_a_model_and_a_cluster_that_there_are_not_are_listed_too(tmp_path: Path) -> None:
    """With other mistakes, and alone; one of them alone is a sentence."""
    path = tmp_path / "job.toml"
    names = 'model = "llama-3-80b"\ncluster = "dgx-a10"\n'
    path.write_text(names + "nodez = 2\n")
    with pytest.raises(InputError) as error:
        load_experiment(path)
    assert [line.split(";")[0] for line in said(error)] == [
        "job.toml: 3 problems:",
        "unknown model 'llama-3-80b'",
        "unknown cluster 'dgx-a10'",
        "unknown key 'nodez'",
    ]
    path.write_text(names)
    with pytest.raises(InputError) as error:
        resolve(load_experiment(path))
    assert [line.split(";")[0] for line in said(error)] == [
        "experiment: 2 problems:",
        "unknown model 'llama-3-80b'",
        "unknown cluster 'dgx-a10'",
    ]
    path.write_text('model = "gpt2"\ncluster = "dgx-a10"\n')
    with pytest.raises(InputError, match=r"^unknown cluster 'dgx-a10'; did you mean 'dgx-a100-40gb'\?"):
        resolve(load_experiment(path))


def test_numbers_of_nodes_in_the_place_of_a_cluster_are_told_where_they_go() -> None:
    """A name was missed, and the last type proposed as the cluster that was meant."""
    with pytest.raises(InputError, match=r"--cluster dgx-h100 --set cluster\.nodes=.1 dgx-h100, 1 dgx-1."):
        resolve(Experiment(model="gpt2", cluster="1 dgx-h100, 1 dgx-1"))


def test_an_unknown_kind_of_strategy_hides_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('modl = "gpt2"\ncluster = "dgx-h100"\n[strategy]\nkind = "fsdp3"\n')
    with pytest.raises(InputError) as error:
        load_experiment(path)
    assert len(said(error)) == 3  # what stands before them, and two
    assert "found 'fsdp3'" in str(error.value)
    assert "unknown key 'modl'; did you mean 'model'?" in str(error.value)


def test_a_studys_problems_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_text('nmae = "x"\nexperimnt = "y"\n[axes]\nnodes = 3\ngpus = []\n')
    with pytest.raises(InputError) as error:
        load_study(path)
    assert [line.split(";")[0] for line in said(error)] == [
        "study.toml: 4 problems:",
        "unknown key 'nmae'",
        "unknown key 'experimnt'",
        "axes: nodes: found 3, expected a list of values, or { from, to, step } or { from, to, factor }",
        "axes: gpus: found [], expected a list of values, or { from, to, step } or { from, to, factor }",
    ]


def test_a_deepspeed_jsons_problems_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 7, "overlap_com": True}, "train_batch": 3}))

    with pytest.raises(InputError) as error:
        resolve(load_experiment_with(path))
    assert [line.partition(";")[0] for line in said(error)[1:]] == [
        "zero_optimization: unknown key 'overlap_com'",
        "unknown key 'train_batch'",
        "zero_optimization.stage: found 7, expected less than or equal to 3",
    ]
    assert said(error)[0].endswith(": 3 problems:")


def load_experiment_with(config: Path) -> Experiment:

    return Experiment(model="gpt2", cluster="dgx-h100", strategy={"config": str(config)})


def test_one_problem_stays_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('model = "gpt2"\ncluster = "dgx-h100"\nnodez = 2\n[strategy]\nkind = "fsdp2"\n')
    with pytest.raises(InputError) as error:
        load_experiment(path)
    assert str(error.value) == "job.toml: unknown key 'nodez'; did you mean 'nodes'?"


def test_the_same_wrong_value_twice_is_two_problems_and_a_unions_is_one(tmp_path: Path) -> None:
    """`reshard_after_forward` is a switch or a number: one sentence, not one for each."""
    path = tmp_path / "job.toml"
    path.write_text(
        'model = "gpt2"\ncluster = "dgx-h100"\n[training]\nsequence_length = "x"\nmicro_batch_size = "x"\n'
        '[strategy]\nkind = "fsdp2"\nreshard_after_forward = "x"\n'
    )
    with pytest.raises(InputError) as error:
        load_experiment(path)
    assert [problem.partition(":")[0] for problem in said(error)[1:]][:2] == [
        "training.sequence_length",
        "training.micro_batch_size",
    ]
    assert len(said(error)) == 4
