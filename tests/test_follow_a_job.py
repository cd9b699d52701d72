"""Read this first: one job from its file to its report, value by value.

    file -> Experiment -> Job -> Plan -> [ engine: devices + fabric on SimPy ] -> Trace -> Report

GPT-2 (124,439,808 parameters) is trained by PyTorch's DDP on two H100 of one node. Everything expected here
can be worked out on paper, and is, in the docstrings.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import zsim
from zsim.frameworks.ddp.settings import DdpConfig
from zsim.plan.ops import Collective, Plan
from zsim.specs.experiment.resolve import resolve

PARAMETERS = 124_439_808
FILE = """
model = "gpt2"
cluster = "dgx-h100"
gpus = 2
[strategy]
kind = "ddp"
[training]
sequence_length = 1024
micro_batch_size = 1
"""


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> zsim.Experiment:
    """What a person wrote: tables of keys, most of them left out."""
    path = Path(tmp_path_factory.mktemp("job")) / "experiment.toml"
    path.write_text(FILE)
    return zsim.load_experiment(path)


@pytest.fixture(scope="module")
def plan(experiment: zsim.Experiment) -> Plan:
    """What each rank will do: ops in the order in which the host issues them, without a second in them."""
    return zsim.make_plan(experiment)


@pytest.fixture(scope="module")
def result(experiment: zsim.Experiment) -> zsim.Result:
    """What happened on the clock: a trace, and the report on it."""
    return zsim.simulate(experiment)


def test_the_job_has_nothing_left_open(experiment: zsim.Experiment) -> None:
    """`resolve` fills what the file left out by the framework's own defaults: DDP's buckets are of 25 MiB."""
    job = resolve(experiment)
    assert job.world_size == 2
    assert job.model.numel == PARAMETERS
    assert isinstance(job.strategy, DdpConfig)
    assert job.strategy.bucket_cap_bytes == 25 * 2**20
    assert job.training.precision == "bf16"
    assert job.cluster.gpu.name == "h100-sxm-80gb"


def test_the_plan_reduces_every_gradient_once(plan: Plan) -> None:
    """DDP all-reduces gradients in fp32: 4 bytes for each parameter, in 13 buckets, on a stream of their own.
    Every reduction comes after the kernels that made its gradients."""
    reductions = [op for op in plan.ops if isinstance(op.work, Collective)]
    sizes = [op.work.bytes for op in reductions if isinstance(op.work, Collective)]
    assert sum(sizes) == 4 * PARAMETERS
    assert len(sizes) == 13
    assert {op.stream for op in reductions} == {"all_reduce"}
    assert all(op.after for op in reductions)


def test_the_clock_keeps_the_laws_of_streams_and_links(result: zsim.Result) -> None:
    """Kernels of a stream run one after the other. A ring of two ranks sends every byte once each way, so no
    reduction beats the 450 GB/s of H100's NVLink."""
    spans = result.trace.to_frame()
    compute = spans[(spans["rank"] == 0) & (spans["stream"] == "compute")].sort_values("start_seconds")
    starts, ends = (compute[name].to_numpy(float) for name in ("start_seconds", "end_seconds"))
    assert np.all(starts[1:] >= ends[:-1] - 1e-12)
    reductions = spans[spans["kind"] == "all_reduce"]
    seconds = reductions["end_seconds"] - reductions["start_seconds"]
    assert (seconds > reductions["bytes"] / 450e9).all()


def test_the_report_adds_up(result: zsim.Result) -> None:
    """The parts of the step are the step. States are fp32: 4 bytes a parameter for the weight, 4 for its
    gradient, 8 for Adam's two moments."""
    report = result.report.to_dict()
    assert sum(report["breakdown_seconds"].values()) == pytest.approx(report["step_seconds"])
    states = report["peak_bytes"]["gpu"]
    assert states["parameters"] == 4 * PARAMETERS
    assert states["gradients"] == 4 * PARAMETERS
    assert states["optimizer_states"] == pytest.approx(8 * PARAMETERS, rel=1e-6)
    assert report["fits"] is True
    assert report["tokens_per_second_per_gpu"] == pytest.approx(1024 / report["step_seconds"])


def test_a_setting_is_changed_and_simulated_again(experiment: zsim.Experiment, result: zsim.Result) -> None:
    """FSDP2 shards weights, gradients and states over the two ranks: half of each, less the padding."""
    sharded = zsim.simulate(experiment.model_copy(update={"strategy": zsim.Fsdp2()})).report.to_dict()
    whole = result.report.to_dict()
    for name in ("parameters", "gradients", "optimizer_states"):
        half = whole["peak_bytes"]["gpu"][name] / 2
        assert sharded["peak_bytes"]["gpu"][name] == pytest.approx(half, rel=0.01)
