"""Where an error says that a value is: keys as the file has them."""

from __future__ import annotations

import re
from typing import Any

import pytest

import zsim
from zsim.errors import InputError
from zsim.specs.cluster.gpu import AttentionCurve
from zsim.specs.messages import validated


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
        ("training.lora.rank_pattern", {"q": 0}, "training.lora.rank_pattern.q: found 0, expected greater"),
        ("training.lora.targets", ["q_proj", 1], "training.lora.targets.1: found 1, expected a valid string"),
        ("parallelism.expert_imbalance", [-1.0], "parallelism.expert_imbalance.0: found -1.0, expected"),
        ("parallelism.layers_per_stage", ["x"], "parallelism.layers_per_stage.0: found 'x', expected"),
        ("strategy.replicate", "x", "strategy.replicate: found 'x', expected"),
        ("strategy", 2.5, "strategy: found 2.5, expected a table"),
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
    assert not re.search(r"literal\[|function-|constrained-|tuple\[|dict\[", str(caught.value))


def test_a_number_of_a_json_s_union_is_named_by_its_key() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "pipeline": {"stages": -1}}
    strategy = {"kind": "deepspeed", "config": config}
    with pytest.raises(InputError, match=r"^DeepSpeed config: pipeline\.stages: found -1, expected greater"):
        zsim.simulate(zsim.Experiment(model="llama-3-8b", cluster="dgx-h100", strategy=strategy))


def test_a_wrong_key_of_a_table_is_named_itself() -> None:
    """pydantic marks it by "[key]" behind it."""
    with pytest.raises(InputError, match=r"by_head_dim\.wide: found 'wide', expected a valid integer"):
        validated({"by_head_dim": {"wide": {}}}, "F", AttentionCurve)
