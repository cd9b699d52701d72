"""zsim's plans against the calls that real DeepSpeed made; DeepSpeed itself is not needed.

Every setting that changes what is sent, on 2 and on 4 ranks; and the order in which ZeRO-3 enters the modules
of Hugging Face's own models.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

import zsim
from validation import plan_check
from validation.cases.cases import ANY_CLUSTER
from validation.deepspeed_calls.configurations import STAGE_3, configuration, configurations
from zsim.comparison.plan_check import calls_of_plan, unfold
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.stage3.fetch_trace import trace_of
from zsim.plan.workload.workload import make_workload
from zsim.specs.experiment.resolve import resolve

FOLDER = Path(__file__).parents[2] / "traces" / "deepspeed"
RECORDED = json.loads((FOLDER / "calls.json").read_text())
HYBRIDS = json.loads((FOLDER / "hybrids.json").read_text())["cases"]
HOOKS = json.loads((FOLDER / "hooks.json").read_text())["models"]


def plan_of(name: str) -> zsim.Plan:
    described = RECORDED["configurations"][name]["experiment"]
    model = RECORDED["models"][described["model"]]
    experiment = zsim.Experiment(**{**described, "model": model, "cluster": ANY_CLUSTER})
    return zsim.make_plan(experiment)


@pytest.mark.parametrize("name", RECORDED["configurations"])
def test_a_plan_makes_the_calls_that_deepspeed_made(name: str) -> None:
    """Kind, bytes, type, group and order of every call of a steady step."""
    theirs = unfold(RECORDED["configurations"][name]["calls"])
    assert plan_check.first_difference(calls_of_plan(plan_of(name)), theirs) is None


def test_every_configuration_is_recorded() -> None:
    names = {
        f"{recording.name}-{model}-{ranks}ranks"
        for recording, model in configurations()
        for ranks in (2, 4)
        if ranks >= recording.min_ranks
    }
    assert names == set(RECORDED["configurations"])
    assert len(names) > 250


def test_configurations_differ_in_what_they_send() -> None:
    """Or they would show nothing: of 2 ranks and one model most call lists are different ones."""
    lists = {
        json.dumps(entry["calls"])
        for name, entry in RECORDED["configurations"].items()
        if name.endswith("-even-2ranks")
    }
    assert len(lists) > 45


@pytest.mark.parametrize("case", HOOKS, ids=lambda case: case["name"] + "-again" * case["checkpointing"])
def test_modules_are_entered_in_the_order_of_the_real_model(case: dict[str, Any]) -> None:
    """transformers' classes under DeepSpeed: forward, recomputation and backward, modules without parameters
    included."""
    job = resolve(
        zsim.Experiment(
            model=case["config"],
            cluster=ANY_CLUSTER,
            gpus=2,
            training={
                "sequence_length": 16,
                "micro_batch_size": 2,
                "attention": "math",
                "activation_checkpointing": "full" if case["checkpointing"] else "none",
            },
            strategy={"kind": "deepspeed", "stage": 3},
        )
    )
    assert isinstance(job.strategy, DeepSpeedConfig)
    workload = make_workload(job.model, job.training)
    hooked = trace_of(workload, job.strategy.zero, 2).hooked
    assert list(hooked.order(workload)) == case["entered"]


def hybrid_plan(case: str) -> zsim.Plan:
    kind = case.partition(" ")[0]
    zero = configuration("hybrids", STAGE_3).strategy or {}
    strategy = (
        {"kind": "deepspeed", **zero} if kind == "deepspeed" else {"kind": kind, "wrapping": "huggingface"}
    )
    training = {"sequence_length": 16, "precision": "fp32", "attention": "math", "gradient_clipping": 0.0}
    return zsim.make_plan(
        zsim.Experiment(
            model=HYBRIDS[case]["model"], cluster=ANY_CLUSTER, gpus=2, strategy=strategy,
            training={**training, "micro_batch_size": 2 if kind == "deepspeed" else 1},
        )
    )  # fmt: skip


@pytest.mark.parametrize("case", HYBRIDS)
def test_a_hybrid_makes_the_calls_that_its_framework_made(case: str) -> None:
    """Under ZeRO-3 one of Zamba2's prefetches begins a module later: as many bytes, in other parts."""
    mine, theirs = calls_of_plan(hybrid_plan(case)), unfold(HYBRIDS[case]["calls"])
    if case == "deepspeed zamba2":
        assert len(mine) == len(theirs)
        assert sum(call.bytes for call in mine) == sum(call.bytes for call in theirs)
        mine, theirs = ([call for call in calls if call.kind != "all_gather"] for calls in (mine, theirs))
    assert plan_check.first_difference(mine, theirs) is None


@pytest.mark.torch
def test_live_deepspeed_makes_the_recorded_calls() -> None:
    """A few configurations now, in one start of two ranks."""
    missing = [name for name in ("torch", "deepspeed") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; DeepSpeed is not checked live here")
    from validation.launch import run

    wanted = ("stage1-owners", "stage2-fp32-summed", "stage3-live", "stage3-checkpointing", "stage3-offload")
    cases = [case for case in configurations() if case[0].name in wanted and case[1] == "even"]
    (calls, other) = run("validation.deepspeed_calls.ranks:calls_of", 2, (cases,), timeout=300)
    assert calls == other
    recorded = [
        RECORDED["configurations"][f"{recording.name}-{model}-2ranks"]["calls"] for recording, model in cases
    ]
    assert calls == recorded
