"""`training.reference`: the forward of a frozen model beside the trained one's, as in DPO."""

from __future__ import annotations

from typing import Any

import pytest

import zsim
from zsim.errors import InputError, NotSimulatedError
from zsim.specs.experiment.resolve import resolve

NUMEL = 124_439_808  # GPT-2


def experiment(reference: str | None, kind: str = "ddp", **training: Any) -> zsim.Experiment:
    return zsim.Experiment(
        model="gpt2",
        cluster="dgx-h100",
        gpus=2,
        training={
            "sequence_length": 512,
            "micro_batch_size": 4,
            "gradient_accumulation_steps": 3,
            "precision": "bf16",
            "reference": reference,
            **training,
        },
        strategy={"kind": kind, **({"stage": 2} if kind == "deepspeed" else {})},
    )


def peaks(job: zsim.Experiment) -> dict[str, int]:
    found: dict[str, int] = zsim.simulate(job).report.to_dict()["peak_bytes"]["gpu"]
    return found


def test_a_copy_is_held_by_every_rank_in_the_type_of_the_weights() -> None:
    assert peaks(experiment("copy"))["parameters"] == 2 * 4 * NUMEL
    assert peaks(experiment("copy", stored_dtype="bf16"))["parameters"] == 2 * 2 * NUMEL
    assert peaks(experiment("copy", frozen_dtype="bf16"))["parameters"] == (4 + 2) * NUMEL
    assert peaks(experiment("copy", "deepspeed"))["parameters"] == 2 * 2 * NUMEL


def test_it_runs_forward_once_in_every_micro_batch() -> None:
    plan = zsim.make_plan(experiment("copy"))
    ops = [plan.programs[0].ops[number] for number in range(len(plan.programs[0].ops))]
    forwards = [op for op in ops if op.phase == "forward" and op.name == "transformer.h.0.attn.c_attn"]
    references = [op for op in ops if op.name == "transformer.h.0.attn.c_attn of the reference"]
    assert len(forwards) == len(references) == 3
    assert {op.phase for op in references} == {"reference"}
    assert [op.work for op in references] == [op.work for op in forwards]


def test_it_takes_what_a_forward_takes() -> None:
    """The kernels are those of the trained model's forward, of which bf16 weights need no casts."""
    trace = zsim.simulate(experiment("copy", stored_dtype="bf16", micro_batch_size=48)).trace.to_frame()
    compute = trace[(trace["rank"] == 0) & (trace["stream"] == "compute")]
    seconds = (compute["end_seconds"] - compute["start_seconds"]).groupby(compute["phase"]).sum()
    assert seconds["reference"] == pytest.approx(seconds["forward"], rel=1e-6)


def test_its_tensors_are_freed_before_backward() -> None:
    """The reference's logits are there beside all that the forward keeps, and nothing is left of them."""
    alone, both = (
        peaks(experiment(reference, stored_dtype="bf16"))["activations"] for reference in (None, "copy")
    )
    logits = 4 * 512 * 50_257
    assert 2 * logits <= both - alone <= 12 * logits


def test_the_base_of_adapters_costs_no_weights() -> None:
    lora = {"rank": 8}
    assert (
        peaks(experiment("base", lora=lora))["parameters"] == peaks(experiment(None, lora=lora))["parameters"]
    )
    with pytest.raises(InputError, match=r"found 'base' without training\.lora"):
        resolve(experiment("base"))


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_where_forward_gathers_it_is_refused(kind: str) -> None:
    with pytest.raises(
        NotSimulatedError, match=f"strategy '{kind}' yet; expected strategy 'ddp' or 'deepspeed'"
    ):
        resolve(experiment("copy", kind))


def test_zero_3_is_refused() -> None:
    job = experiment("copy", "deepspeed").model_copy()
    data = job.model_dump(exclude_unset=True)
    data["strategy"]["stage"] = 3
    with pytest.raises(NotSimulatedError, match="with ZeRO stage 3"):
        resolve(zsim.Experiment(**data))


def test_kto_asks_three_times() -> None:
    plan = zsim.make_plan(experiment("copy", reference_forwards=3))
    ops = [plan.programs[0].ops[number] for number in range(len(plan.programs[0].ops))]
    assert sum(op.name == "transformer.h.0.attn.c_attn of the reference" for op in ops) == 3 * 3
    assert peaks(experiment("copy", reference_forwards=3)) == peaks(experiment("copy"))
    with pytest.raises(InputError, match=r"reference_forwards: found 3 without training\.reference"):
        resolve(experiment(None, reference_forwards=3))
