"""Simulated pipelines, tensor and context parallel steps, replayed on a cluster."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import zsim
from zsim.errors import NotSimulatedError
from zsim.trace.chrome.write import write_chrome_traces
from zsim.trace.trace import SpanInfos, Trace

UNTIED = Path(__file__).resolve().parents[1] / "golden" / "model.json"
MEGATRON: dict[str, Any] = {"kind": "megatron"}
TITAN: dict[str, Any] = {"kind": "fsdp2"}
SLOW: dict[str, Any] = {
    "extends": "dgx-h100",
    "nic": {"bandwidth": "10 Gb/s", "source": "a test", "evidence": "assumed"},
}
# (strategy, parallelism, nodes); models of gpt2's size are bound by their host
JOBS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "two stages": (MEGATRON, {"pipeline": 2}, 1),
    "four stages, tied embeddings": (MEGATRON, {"pipeline": 4}, 1),
    "stages on two nodes": (MEGATRON, {"pipeline": 2}, 2),
    "interleaved": (MEGATRON, {"pipeline": 4, "virtual_stages": 3}, 1),
    "tensor and pipeline": (MEGATRON, {"pipeline": 2, "tensor": 2, "sequence_parallel": True}, 1),
    "distributed optimizer on two nodes": ({**MEGATRON, "distributed_optimizer": True}, {"pipeline": 2}, 2),
    "context": (MEGATRON, {"context": 2}, 1),
    "context and pipeline": (MEGATRON, {"context": 2, "pipeline": 2}, 1),
    "DeepSpeed's": ({"kind": "deepspeed", "stage": 1}, {"pipeline": 2}, 1),
    "torchtitan's": (TITAN, {"pipeline": 2}, 1),
    "torchtitan's, interleaved": (TITAN, {"pipeline": 2, "schedule": "interleaved-1f1b"}, 2),
    "torchtitan's, zero bubble": (TITAN, {"pipeline": 2, "schedule": "interleaved-zero-bubble"}, 1),
}


def untied(folder: Path) -> Path:
    """A small model of eight layers that torchtitan may cut into stages."""
    config = json.loads(UNTIED.read_text())
    path = folder / "model" / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**config, "num_hidden_layers": 8}))
    return path


def job(name: str, folder: Path, cluster: str | dict[str, Any] = "dgx-h100") -> zsim.Experiment:
    strategy, parallelism, nodes = JOBS[name]
    return zsim.Experiment(
        model=str(untied(folder)) if strategy == TITAN else "gpt2",
        cluster=cluster,
        nodes=nodes,
        training={"sequence_length": 512, "gradient_accumulation_steps": 4},
        strategy=strategy,
        parallelism=parallelism,
    )


def written(name: str, folder: Path) -> tuple[Trace, Trace]:
    """The simulated step, and what is read from its files."""
    step = zsim.simulate(job(name, folder)).trace
    write_chrome_traces(step, folder / "trace")
    return step, zsim.read_trace(folder / "trace")


@pytest.mark.parametrize("name", JOBS)
def test_a_pipeline_gives_its_step_back(name: str, tmp_path: Path) -> None:
    """Every stage waits for the others: one of them alone would be short by its bubble."""
    step, trace = written(name, tmp_path)
    assert zsim.replay(trace).step_seconds == pytest.approx(step.step_seconds, abs=1e-6)
    for found in (trace, step):
        replay = zsim.replay(found, cluster="dgx-h100")
        assert replay.step_seconds == pytest.approx(step.step_seconds, abs=1e-6)
        assert replay.unexplained_seconds == 0.0
    assert set(replay.replayed.ranks.tolist()) == set(step.ranks.tolist())


@pytest.mark.parametrize("name", ["stages on two nodes", "distributed optimizer on two nodes"])
def test_a_slower_network_takes_what_a_simulation_of_it_takes(name: str, tmp_path: Path) -> None:
    step, trace = written(name, tmp_path)
    expected = zsim.simulate(job(name, tmp_path, SLOW)).trace.step_seconds
    assert expected > 1.04 * step.step_seconds
    assert zsim.replay(trace, cluster=SLOW).step_seconds == pytest.approx(expected, rel=0.02)


def test_a_pipeline_on_other_gpus_is_refused(tmp_path: Path) -> None:
    """More replicas would be other pairs, and more stages another model on each."""
    _, trace = written("two stages", tmp_path)
    with pytest.raises(NotSimulatedError, match=r"zsim run --gpus 16"):
        zsim.replay(trace, cluster="dgx-h100", gpus=16)


@pytest.mark.parametrize("name", ["two stages", "interleaved", "DeepSpeed's"])
def test_one_rank_of_a_pipeline_keeps_the_time_of_its_sends(name: str, tmp_path: Path) -> None:
    """As `zsim run --out` writes it: what the others do is in no file, but how long it was waited for."""
    step, _ = written(name, tmp_path)
    replay = zsim.replay(zsim.read_trace(tmp_path / "trace" / "rank0.json.gz"), cluster="dgx-h100")
    assert replay.step_seconds == pytest.approx(step.step_seconds, rel=0.02)
    assert any("send and recv take their recorded time" in note for note in replay.notes)


def test_sends_without_sides_keep_their_time(tmp_path: Path) -> None:
    """As in torch's recordings: one rank stands for all, and the replay says so."""
    _, trace = written("two stages", tmp_path)
    bare = replace(trace, infos=SpanInfos(info._replace(messages=()) for info in trace.infos))
    replay = zsim.replay(bare, cluster="dgx-h100")
    assert any("send and recv take their recorded time" in note for note in replay.notes)
    assert any("represents all ranks" in note for note in replay.notes)
