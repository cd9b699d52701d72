"""What a shell is offered behind half-typed words."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from zsim.commands.options import complete_clusters, complete_key_values, complete_keys, complete_models


def test_presets_and_keys_are_offered_by_their_beginning() -> None:
    assert "llama-3-8b" in complete_models("llama-3")
    assert complete_clusters("dgx-h") == ["dgx-h100"]
    assert complete_keys("network.nodes_per_r") == ["network.nodes_per_router"]


def test_behind_a_key_its_values_are_offered() -> None:
    assert complete_key_values("training.micro_batch_size") == [
        "training.micro_batch_size=",
        "training.micro_batch_sizes=",
    ]
    assert complete_key_values("strategy.kind=f") == ["strategy.kind=fsdp1", "strategy.kind=fsdp2"]
    assert complete_key_values("parallelism.sequence_parallel=t") == ["parallelism.sequence_parallel=true"]
    assert complete_key_values("cluster.network.kind=t") == ["cluster.network.kind=torus"]
    assert complete_key_values("training.micro_batch_size=") == []
    assert complete_key_values("no.such_key=") == []


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("zsim ru", "run"), ("zsim run --model mixtral-8x7", "mixtral-8x7b"), ("zsim topology sh", "show")],
)
def test_the_shell_is_answered(typed: str, offered: str) -> None:
    told = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1), "_ZSIM_COMPLETE": "complete_bash"}
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv[0] = 'zsim'; from zsim.cli import main; main()"],
        env=os.environ | told,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [offered]
