"""Labels of a job, as headlines have them."""

from __future__ import annotations

from typing import Any

import pytest

import zsim
from zsim.specs.experiment.job import gpus_label
from zsim.specs.experiment.resolve import resolve


@pytest.mark.parametrize(
    ("asked", "label"),
    [
        ({"gpus": 1}, "1 GPU"),
        ({"gpus": 4, "nodes": 1}, "4 GPUs"),
        ({"nodes": 2}, "16 GPUs"),
        ({"gpus": 8, "nodes": 2}, "8 GPUs on 2 nodes"),  # 4 on each, over the network
        ({"placement": {"gpus_per_node": [8, 4]}, "nodes": 2}, "12 GPUs on 2 nodes"),
    ],
)
def test_gpus_that_leave_others_of_their_nodes_alone_say_on_how_many_nodes(
    asked: dict[str, Any], label: str
) -> None:
    job = resolve(zsim.Experiment(model="gpt2", cluster="dgx-h100", strategy={"kind": "ddp"}, **asked))
    assert gpus_label(job) == label
