"""What zsim writes, read back."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import zsim
from zsim.trace.chrome import write_chrome_traces

OFFLOADED = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}


@pytest.fixture(
    scope="module",
    params=[
        {"strategy": {"kind": "fsdp2", "replicate": 2}, "nodes": 2},
        {"strategy": {"kind": "deepspeed", "config": OFFLOADED}, "nodes": 1},
    ],
    ids=["hsdp", "offload"],
)
def both(request, tmp_path_factory):
    """A simulated trace, and what its files hold."""
    training = {"sequence_length": 256}
    experiment = zsim.Experiment(model="gpt2", cluster="dgx-h100", training=training, **request.param)
    simulated = zsim.simulate(experiment).trace
    folder = tmp_path_factory.mktemp("export")
    write_chrome_traces(simulated, folder)
    return simulated, zsim.read_trace(folder)


def rows(trace):
    """All of a span but its dtype, which only collectives write; times in whole nanoseconds."""
    return Counter(
        (
            i.name, i.kind, i.stream, i.bytes, i.group and i.dtype, i.group, i.group_size, i.phase, i.module,
            i.flops, round(i.hbm_bytes), round(start * 1e9), round(end * 1e9),
        )
        for _, i, start, end in trace.rows()
    )  # fmt: skip


def test_every_span_comes_back(both):
    simulated, read = both
    assert rows(read) == rows(simulated)
    assert read.step_seconds == pytest.approx(simulated.step_seconds, abs=1e-9)
    assert read.metadata["groups"] == simulated.metadata["groups"]
    assert read.world_size == simulated.world_size


def test_what_the_host_launched_and_waited_for_comes_back(both):
    simulated, read = both
    on_gpu = np.array([info.kind not in ("cpu", "host", "nvme_read", "nvme_write") for info in read.infos])
    known = np.sort(read.issue_seconds[on_gpu[read.info_indices]])
    on_gpu = np.array(
        [info.kind not in ("cpu", "host", "nvme_read", "nvme_write") for info in simulated.infos]
    )
    issued = np.sort(simulated.issue_seconds[on_gpu[simulated.info_indices]])
    assert known == pytest.approx(issued, abs=1e-9)
    assert len(read.host_blocks) == len(simulated.host_blocks)


def test_memory_has_the_same_end_and_peak(both):
    def peak(memory):
        on_gpu = [
            d for d, device in zip(memory.deltas.tolist(), memory.devices, strict=True) if device == "gpu"
        ]
        return int(np.cumsum(on_gpu).max()), sum(on_gpu)

    simulated, read = both
    assert peak(read.memory) == pytest.approx(peak(simulated.memory), rel=1e-3)
