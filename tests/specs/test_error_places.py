"""Where an error says that a value is: keys as the file has them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

import zsim
from zsim.errors import InputError
from zsim.specs.cluster.gpu import AttentionCurve
from zsim.specs.cluster.network import Network
from zsim.specs.experiment.tables import ExperimentFile
from zsim.specs.key_index import members_of
from zsim.specs.messages import validate_table
from zsim.specs.strategy.registry import STRATEGIES


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("strategy.config", -1, "strategy.config: found -1, expected a valid string"),
        ("model", -1, "model: found -1, expected a valid string"),
        ("training.lora.targets", -1, "training.lora.targets: found -1, expected a valid string"),
        ("training.lora.targets", "(", "training.lora.targets: found '(', expected a regular expression"),
        (
            "training.lora.rank_pattern",
            {"(": 4},
            "training.lora.rank_pattern.(: found '(', expected a regular",
        ),
        ("training.lora.modules_to_save", ["("], "training.lora.modules_to_save.0: found '(', expected a"),
        ("training.lora.rank_pattern", {"q": 0}, "training.lora.rank_pattern.q: found 0, expected greater"),
        ("training.lora.targets", ["q_proj", 1], "training.lora.targets.1: found 1, expected a valid string"),
        ("parallelism.expert_imbalance", [-1.0], "parallelism.expert_imbalance.0: found -1.0, expected"),
        ("parallelism.layers_per_stage", ["x"], "parallelism.layers_per_stage.0: found 'x', expected"),
        (
            "parallelism.context_method",
            "ulysses",
            "parallelism.context_method: found 'ulysses', expected 'p2p', 'all-gather', 'all-to-all' or "
            "'a2a+p2p'; did you mean 'all-to-all'?",
        ),
        ("strategy.replicate", "x", "strategy.replicate: found 'x', expected"),
        ("strategy", 2.5, "strategy: found 2.5, expected a table"),
        (
            "training.lora.target_parameters",
            "experts.down_proj",
            "training.lora.target_parameters: found 'experts.down_proj', expected a list, such as "
            "['experts.down_proj']",
        ),
        ("training.lora.targets", 5, "training.lora.targets: found 5, expected a valid string or a list"),
        ("run", {"phases": "x"}, "run.phases: found 'x', expected a list"),
        ("training.lengths", {"documents": []}, "training.lengths.documents: found a list, expected at"),
        ("training.compile", "maybe", "training.compile: found 'maybe', expected true or false"),
        ("parallelism.expert_imbalance", True, "parallelism.expert_imbalance: found true, expected a"),
        ("parallelism.expert_imbalance", [1.0, True], "parallelism.expert_imbalance.1: found true, expected"),
    ],
)
def test_a_place_has_the_file_s_keys_and_no_member_of_a_union(key: str, value: Any, told: str) -> None:
    """pydantic names the member of a union that refused a value in the path: "str", "literal['all-linear']",
    "function-after[...]", the name of a strategy's table."""
    kind = "deepspeed" if key == "strategy.config" else "fsdp2"
    data: dict[str, Any] = {"strategy": {"kind": kind}}
    *tables, last = key.split(".")
    table = data
    for name in tables:
        table = table.setdefault(name, {})
    table[last] = value
    with pytest.raises(InputError) as caught:
        zsim.Experiment(**{"model": "llama-3-8b", "cluster": "dgx-h100", **data})
    assert str(caught.value).startswith(f"experiment: {told}")
    assert not re.search(r"literal\[|function-|constrained-|tuple|dict\[|validation", str(caught.value))


def numbers(table: type[BaseModel], *above: str) -> Iterator[tuple[str, ...]]:
    """The keys of a table, and of those in it, that hold a number and no boolean."""
    for name, field in table.model_fields.items():
        types = members_of(field.annotation)
        values = [type(value) for one in types if get_origin(one) is Literal for value in get_args(one)]
        if {int, float} & {*types, *values} and bool not in (*types, *values):
            yield (*above, name)
        for one in types:
            if isinstance(one, type) and issubclass(one, BaseModel) and name != "strategy":
                yield from numbers(one, *above, name)


def test_true_is_no_number_in_any_table_of_an_experiment() -> None:
    """pydantic takes true for 1.0, where a field is not strict."""
    places = [*numbers(ExperimentFile)]
    places += [("strategy", *place) for table in STRATEGIES.values() for place in numbers(table)]
    assert len(places) > 100
    kinds = {name: kind for kind, table in STRATEGIES.items() for (name, *_) in numbers(table)}
    for tables in places:
        value: Any = True
        for name in reversed(tables):
            value = {name: value}
        if tables[0] == "strategy":
            value["strategy"]["kind"] = kinds[tables[1]]
        with pytest.raises(InputError) as caught:
            zsim.Experiment(**{"model": "llama-3-8b", "cluster": "dgx-h100", **value})
        assert f"{'.'.join(tables)}: " in str(caught.value)
        assert "found true" in str(caught.value)


@pytest.mark.parametrize("kind", [[], {}, ["torus"]])
def test_the_kind_of_a_network_that_is_no_name_is_told(kind: Any) -> None:
    with pytest.raises(InputError, match=r"F: kind: found a (list|table), expected '"):
        validate_table({"kind": kind}, "F", Network)


def test_a_number_of_a_json_s_union_is_named_by_its_key() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "pipeline": {"stages": -1}}
    strategy = {"kind": "deepspeed", "config": config}
    with pytest.raises(InputError, match=r"^DeepSpeed config: pipeline\.stages: found -1, expected greater"):
        zsim.simulate(zsim.Experiment(model="llama-3-8b", cluster="dgx-h100", strategy=strategy))


def test_a_wrong_key_of_a_table_is_named_itself() -> None:
    """pydantic marks it by "[key]" behind it."""
    with pytest.raises(InputError, match=r"by_head_dim\.wide: found 'wide', expected a valid integer"):
        validate_table({"by_head_dim": {"wide": {}}}, "F", AttentionCurve)
