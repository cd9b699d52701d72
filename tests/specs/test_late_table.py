"""Tables that are validated by themselves: the same errors, values and schemas as if they were part of the
table around them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from zsim.errors import InputError
from zsim.reference.files import schema_of
from zsim.specs.experiment.faults import FaultsTable
from zsim.specs.experiment.run.run import TrainingRunTable
from zsim.specs.experiment.tables import Experiment


def experiment(**tables: Any) -> Experiment:
    return Experiment(model="llama-3-8b", cluster="dgx-h100", **tables)


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"run": {"tokns": 1e12}}, "experiment: run: unknown key 'tokns'; did you mean 'tokens'?"),
        ({"run": {"failures": {"mtbf": 3}}}, "experiment: run.failures: unknown key 'mtbf'"),
        ({"run": 3}, "experiment: run: found 3, expected a table of tokens, steps, "),
        ({"faults": []}, "experiment: faults: found a list, expected a table of links, dead_nics, "),
        (
            {"strategy": {"kind": "fsdp2", "replicate": 0}},
            "experiment: strategy.replicate: found 0, expected greater than 0",
        ),
        (
            {"training": {"lora": {"rank": 0}}},
            "experiment: training.lora.rank: found 0, expected greater than or equal to 1",
        ),
    ],
)  # fmt: skip
def test_an_error_in_a_table_says_where(tables: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as error:
        experiment(**tables)
    assert str(error.value).startswith(said)


def test_a_table_may_be_given_as_an_object_or_as_its_keys() -> None:
    run = TrainingRunTable(tokens="15T")
    assert experiment(run=run).run is run
    assert experiment(run={"tokens": "15T"}).run == run
    slow = experiment(faults={"slow_gpus": {"3": 1.2}}).faults
    assert slow == FaultsTable(slow_gpus={"3": 1.2})


def test_only_what_was_given_is_dumped() -> None:
    given = experiment(run={"tokens": 1e12}, strategy={"stage": 3}).model_dump(exclude_unset=True)
    assert given["run"] == {"tokens": 1e12}
    assert given["strategy"] == {"kind": "deepspeed", "stage": 3}


def test_the_json_schema_has_the_keys_of_every_table() -> None:
    """`run`'s, which is imported late, and those of each of the six strategies."""
    schema = schema_of("experiment")
    definitions = schema["$defs"]
    assert "failures" in definitions["TrainingRunTable"]["properties"]
    assert "slow_gpus" in definitions["FaultsTable"]["properties"]
    assert len(schema["properties"]["strategy"]["oneOf"]) == 6


def test_an_experiment_without_a_run_does_not_import_its_table() -> None:
    code = (
        "import sys; from zsim.specs.experiment.tables import Experiment\n"
        "name = 'zsim.specs.experiment.run.run'\n"
        "Experiment(model='llama-3-8b', cluster='dgx-h100'); print(name in sys.modules)\n"
        "Experiment(model='llama-3-8b', cluster='dgx-h100', run={}); print(name in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
