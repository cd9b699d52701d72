"""What is refused names what to change."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import zsim
from zsim.errors import InputError, NotSimulatedError
from zsim.goodput.checkpoints.saved import saved_files
from zsim.specs.experiment.resolve import resolve
from zsim.study.whole_runs import simulate_run

ZSIM = Path(__file__).parents[2] / "zsim"
FILES = [
    *ZSIM.glob("goodput/**/*.py"),
    *ZSIM.glob("frameworks/*/*checkpoint*.py"),
    *ZSIM.glob("frameworks/*/studies.py"),
]
AS_MEASURED = {"every": 100, "blocking": "1 s", "load": "5 s", "bytes": "10 GB"}


def refusals() -> list[tuple[str, str]]:
    """(where, text) of each error of a user's that the package or a framework's checkpoints raise; names of
    constants stand for them."""
    found = []
    for path in sorted(FILES):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
                continue
            names = [one.id for one in ast.walk(node.exc) if isinstance(one, ast.Name)]
            if not {"InputError", "NotSimulatedError"} & set(names):
                continue
            words = [one.value for one in ast.walk(node.exc) if isinstance(one, ast.Constant)]
            text = " ".join([*map(str, words), *(name for name in names if name.isupper())])
            found.append((f"{path.relative_to(ZSIM)}:{node.lineno}", text))
    return found


def test_every_refusal_says_what_was_expected() -> None:
    every = refusals()
    assert len(every) > 20
    silent = [
        where
        for where, text in every
        if not any(word in text for word in ("expected", "_REMEDIES", "STATE_MEASURED"))
    ]
    assert silent == []


def experiment(**tables: Any) -> zsim.Experiment:
    given: dict[str, Any] = {"model": "llama-3.2-1b", "cluster": "dgx-h100", "nodes": 6,
                             "strategy": {"kind": "fsdp2"}}  # fmt: skip
    return zsim.Experiment(**{**given, **tables})


def test_replicas_that_do_not_divide_the_nodes_have_numbers_that_do() -> None:
    run = {"tokens": "1B", "local": {"replicas": 4}, "checkpoint": AS_MEASURED}
    with pytest.raises(InputError, match=r"does not divide the 6 nodes; expected 2 or 3 or 6, as a replica"):
        simulate_run(experiment(run=run), compares=False)


def test_a_run_that_cannot_finish_names_the_keys_that_would_let_it() -> None:
    run = {"tokens": "1B", "checkpoint": AS_MEASURED, "failures": {"per_1000_node_days": 5e6}}
    with pytest.raises(
        InputError, match=r"expected a shorter run\.checkpoint\.every or run\.recovery\.restart"
    ):
        simulate_run(experiment(run=run), compares=False)
    stops = {"per_1000_node_days": 0, "planned_per_day": 500, "planned_takes": "5 min"}
    run = {"tokens": "1B", "checkpoint": AS_MEASURED, "failures": stops}
    with pytest.raises(InputError, match=r"expected a lower run\.failures\.planned_per_day"):
        simulate_run(experiment(run=run), compares=False)


def test_files_that_are_not_known_can_be_stated_or_left_out() -> None:
    """What the refusal names is taken: bytes, blocking and load as measured, or no saves at all."""
    strategy = {"kind": "megatron", "fsdp_sharding": "optim_grads", "distributed_optimizer": True}
    with pytest.raises(
        NotSimulatedError, match=r"expected run\.checkpoint\.bytes, blocking and load as .*'none'"
    ):
        saved_files(resolve(experiment(strategy=strategy)))
    for place in (AS_MEASURED, {"mode": "none"}):
        run = {"tokens": "100M", "seeds": 1, "checkpoint": place, "failures": {"per_1000_node_days": 0}}
        assert simulate_run(experiment(strategy=strategy, run=run), compares=False).goodput_fraction > 0.5
