"""Garbage collection while zsim simulates, and when its process ends."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from zsim import Experiment, garbage_collection
from zsim.api import make_plan, simulate
from zsim.plan.make import plan_basis, plan_of
from zsim.specs.experiment.resolve import resolve


def test_what_a_pause_made_is_not_scanned_right_after_it() -> None:
    """20,000 new lists are 28 times the 700 that let Python scan the young generation."""
    gc.collect()
    with garbage_collection.pause():
        made: list[list[int]] = [[] for _ in range(20_000)]
        assert gc.get_count()[0] >= len(made)
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_count()[0] < 1_000
    assert any(one is made for one in gc.get_objects(generation=2))


def test_cycles_of_a_pause_are_found_by_a_full_collection() -> None:
    gc.collect()
    with garbage_collection.pause():
        for _ in range(100):
            ring: list[object] = []
            ring.append(ring)
    del ring
    assert gc.collect() >= 100


def test_objects_that_the_caller_froze_stay_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with garbage_collection.pause():
            pass
        assert gc.get_freeze_count() == frozen
    finally:
        gc.unfreeze()


def test_a_process_ends_without_a_last_search_for_cycles() -> None:
    """The object in a cycle would print when it is collected."""
    code = """
from zsim import Experiment, garbage_collection
from zsim.api import make_plan, simulate
class Loud:
    def __del__(self):
        print("collected")
one = Loud()
one.cycle = one
del one
"""
    for end, printed in (("", "collected\n"), ("garbage_collection.freeze_at_exit()", "")):
        run = subprocess.run([sys.executable, "-c", code + end], capture_output=True, text=True, check=True)
        assert run.stdout == printed


def test_the_program_searches_for_cycles_neither_while_it_imports_nor_while_it_reads_options() -> None:
    code = """
import gc, sys
from zsim.__main__ import main
found = []
gc.callbacks.append(lambda phase, info: found.append(phase))
sys.argv = ["zsim", "presets"]
try:
    main()
except SystemExit:
    print(f"{found.count('start')} searches", file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "0 searches"


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2", "megatron"])
def test_a_plan_leaves_nothing_in_cycles(kind: str) -> None:
    """The chunks of a rank name each other while they issue their step; 4,000 objects each were left."""
    asked = {"model": "gpt2-medium", "cluster": "dgx-a100-40gb", "strategy": {"kind": kind}}
    if kind == "megatron":
        asked["parallelism"] = {"pipeline": 2, "tensor": 2}
    experiment = Experiment.model_validate(asked)
    make_plan(experiment)  # what is derived once stays
    gc.collect()
    plan = make_plan(experiment)
    del plan
    assert gc.collect() == 0


def test_a_plan_is_made_and_a_step_is_simulated_without_collections() -> None:
    """GPT-2 medium's plan has more ops than the 700 objects after which Python collects."""
    collections: list[str] = []

    def note(phase: str, _info: Mapping[str, int]) -> None:
        collections.append(phase)

    experiment = Experiment(model="gpt2-medium", cluster="dgx-h100", gpus=8, strategy={"kind": "ddp"})
    basis = plan_basis(resolve(experiment))
    for run in (lambda: plan_of(basis), lambda: simulate(experiment)):
        gc.collect()
        gc.callbacks.append(note)
        try:
            assert run() is not None
        finally:
            gc.callbacks.remove(note)
    assert collections == []


@pytest.mark.parametrize(
    "asked",
    [
        {"strategy": {"kind": "fsdp2"}},
        {"strategy": {"stage": 3}},
        {"strategy": {"kind": "megatron"}, "parallelism": {"pipeline": 2, "tensor": 2}},
    ],
    ids=["fsdp2", "stage 3", "pipeline"],
)
def test_a_simulated_step_goes_with_its_last_user(asked: dict[str, Any]) -> None:
    """Without a cycle that only a full collection of all objects would find: each row of `zsim check` under a
    pipeline kept 230 MB. Blocks of torch's allocator know their neighbours, and are few."""
    alike = {"model": "llama-3.2-1b", "cluster": "dgx-h100", "gpus": 16}
    experiment = Experiment.model_validate(asked | alike)
    simulate(experiment)
    gc.collect()
    gc.disable()
    try:
        simulate(experiment)
        assert gc.collect() < 2_000
    finally:
        gc.enable()
