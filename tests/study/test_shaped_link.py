"""The step that gathers ahead, from the one that does not."""

from __future__ import annotations

from typing import Any

import pytest

from validation.cases import shaped_link
from validation.cases.cases import case_rows
from validation.cases.shaped_link import predict_ahead
from zsim.engine.simulate import simulate_job

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
}


def recording(speed: float, efficiency: float) -> dict[str, Any]:
    """What two nodes of a machine of that speed, on a link of that efficiency, would write down."""
    content: dict[str, Any] = {
        "model": SHAPE,
        "rate": "400mbit",
        "sequences_per_node": 16,
        "sequence_length": 64,
        "nodes": 2,
        "foreign_cpu_fraction": 0.02,
    }
    for way, prefetch in (("serial", 0), ("ahead", 1)):
        job = shaped_link._on(shaped_link._job(content, prefetch=prefetch), speed, efficiency)
        trace = simulate_job(job).trace.select_rank(0)
        gathers, _ = shaped_link._seconds(trace)
        content[way] = {
            "step_seconds": {"mean": trace.step_seconds, "median": trace.step_seconds},
            "gather_seconds": gathers,
            "declared_wire_bytes": 1000,
            "received_bytes": [1001, 1002],
        }
    return content


@pytest.mark.parametrize(("speed", "efficiency"), [(0.4, 0.5), (1.0, 0.9), (1.7, 0.7)])
def test_a_machine_that_zsim_does_not_know_is_found_from_its_serial_step(
    speed: float, efficiency: float
) -> None:
    content = recording(speed, efficiency)
    predicted = predict_ahead(content)
    assert predicted.seconds == pytest.approx(content["ahead"]["step_seconds"]["mean"], rel=0.01)
    assert predicted.seconds_without_overlap > 1.1 * predicted.seconds


def verdicts(content: dict[str, Any], tmp_path: Any) -> dict[str, str]:
    return {row.name: row.outcome for row in case_rows("link", tmp_path / "link.json", content)}


def test_the_check_wants_the_step_and_that_overlap_explains_it(tmp_path: Any) -> None:
    """A step that took what its parts take one after the other hid nothing."""
    content = recording(1.0, 0.9)
    judged = verdicts(content, tmp_path)
    assert judged["ahead, step"] == judged["ahead, nearer than without overlap"] == "pass"
    content["ahead"]["step_seconds"]["mean"] = predict_ahead(content).seconds_without_overlap
    judged = verdicts(content, tmp_path)
    assert judged["ahead, step"] == judged["ahead, nearer than without overlap"] == "fail"


def test_a_busy_machine_proves_nothing(tmp_path: Any) -> None:
    judged = verdicts(recording(1.0, 0.9) | {"foreign_cpu_fraction": 0.4}, tmp_path)
    assert judged["ahead, step"] == judged["ahead, nearer than without overlap"] == "inconclusive"
    assert judged["serial, bytes on the wire"] == "pass"
