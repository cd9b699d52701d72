"""One rank stands for its class under FSDP2 by tensor and pipeline parallelism, on 8 to 64 ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zsim.engine.simulate import Outcome, simulate_job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

CONFIG = {
    "model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8,
    "intermediate_size": 1536, "vocab_size": 4096, "num_hidden_layers": 4, "max_position_embeddings": 4096,
    "tie_word_embeddings": False, "hidden_act": "silu", "rms_norm_eps": 1e-5,
}  # fmt: skip
ONE, TWO = {"layers_per_stage": [2, 2]}, {"layers_per_stage": [1] * 4}
MESHES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "tensor": (2, {"tensor": 4}, {}),
    "tensor, hsdp": (2, {"tensor": 2}, {"replicate": 2}),
    "tensor without sequences, node by node": (2, {"tensor": 8, "sequence_parallel": False}, {}),
    "gpipe": (1, {"tensor": 2, "pipeline": 2, "schedule": "gpipe", **ONE}, {}),
    "1f1b": (2, {"tensor": 2, "pipeline": 2, **ONE}, {}),
    "1f1b, hsdp": (2, {"tensor": 2, "pipeline": 2, **ONE}, {"replicate": 2, "reshard_after_forward": True}),
    "interleaved-1f1b": (2, {"tensor": 4, "pipeline": 2, "schedule": "interleaved-1f1b", **TWO}, {}),
    "looped-bfs": (1, {"tensor": 2, "pipeline": 2, "schedule": "looped-bfs", **TWO}, {}),
    "interleaved-zero-bubble": (
        1, {"tensor": 2, "pipeline": 2, "schedule": "interleaved-zero-bubble", **TWO}, {},
    ),
    "zbv-zero-bubble": (2, {"pipeline": 2, "schedule": "zbv-zero-bubble", **TWO}, {}),
    "dualpipe-v": (2, {"tensor": 2, "pipeline": 2, "schedule": "dualpipe-v", **TWO}, {}),
    "64 ranks": (8, {"tensor": 4, "pipeline": 4, **TWO}, {}),
}  # fmt: skip


def simulate(path: Path, nodes: int, parallelism: Any, strategy: Any, *, unfold: bool) -> Outcome:
    path.write_text(json.dumps(CONFIG))
    experiment = Experiment(
        model=str(path),
        cluster="dgx-h100",
        nodes=nodes,
        training={"sequence_length": 512, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0},
        strategy={"kind": "fsdp2", **strategy},
        parallelism=parallelism,
    )
    return simulate_job(resolve(experiment), unfold=unfold)


@pytest.mark.parametrize("name", MESHES)
def test_folded_equals_unfolded_on_a_mesh(name: str, tmp_path: Path) -> None:
    """Step time, the end of each rank's work, traffic: to 1e-9."""
    nodes, parallelism, strategy = MESHES[name]
    path = tmp_path / "config.json"
    folded = simulate(path, nodes, parallelism, strategy, unfold=False)
    unfolded = simulate(path, nodes, parallelism, strategy, unfold=True)
    job = unfolded.job
    assert folded.stats.rank_classes < unfolded.stats.rank_classes == job.world_size
    assert unfolded.trace.step_seconds == pytest.approx(folded.trace.step_seconds, rel=1e-9)
    every = np.sort(np.unique(np.round(unfolded.trace.end_seconds, 15)))
    for end in np.unique(folded.trace.end_seconds):
        nearest = every[np.abs(every - end).argmin()]
        assert nearest == pytest.approx(end, rel=1e-9, abs=1e-12)
    for link, load in unfolded.traffic.items():
        assert load == pytest.approx(folded.traffic[link], rel=1e-9)


def test_a_scalar_among_all_ranks_splits_no_class(tmp_path: Path) -> None:
    """The norm of the gradients goes through all 8 nodes in a ring or a tree, whose ends have less to send
    than the nodes between: 4 bytes, for which a pipeline rank is not simulated three times. Step and ends are
    those of all ranks all the same."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    experiment = Experiment(
        model=str(path), cluster="dgx-h100", nodes=8, parallelism={"tensor": 8, "pipeline": 2},
        training={"sequence_length": 512, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0},
        strategy={"kind": "megatron", "distributed_optimizer": True},
    )  # fmt: skip
    folded, unfolded = (simulate_job(resolve(experiment), unfold=unfold) for unfold in (False, True))
    assert folded.stats.rank_classes == 2
    assert folded.trace.step_seconds == pytest.approx(unfolded.trace.step_seconds, rel=1e-9)
