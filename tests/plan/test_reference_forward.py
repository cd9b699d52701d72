"""`training.reference`: the forward of a frozen model beside the trained one's, as in DPO."""

from __future__ import annotations

from typing import Any

import pytest

import zsim
from zsim.errors import InputError, NotSimulatedError
from zsim.plan.checks import check_plan
from zsim.plan.ops import Collective
from zsim.specs.experiment.load import change_experiment
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


def test_a_copy_of_a_model_in_4_bits_is_in_4_bits() -> None:
    """As large as the model with its adapters, scales and maps included."""
    lora = {"quantized": "nf4"}
    alone = peaks(experiment(None, lora=lora, stored_dtype="bf16"))["parameters"]
    assert peaks(experiment("copy", lora=lora, stored_dtype="bf16"))["parameters"] == 2 * alone


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


def gathers(job: zsim.Experiment) -> list[str]:
    """The phases of the all-gathers of the last block's weights, in order."""
    ops = zsim.make_plan(job).programs[0].ops
    names = [(op.name, op.phase) for op in (ops[number] for number in range(len(ops)))]
    return [phase for name, phase in names if name.startswith("all_gather ") and "h.11" in name]


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_a_sharded_copy_is_gathered_in_its_forward(kind: str) -> None:
    """The last block is gathered in forward, in the reference's, and kept or gathered for backward."""
    alone, both = gathers(experiment(None, kind)), gathers(experiment("copy", kind))
    assert both.count("reference") == alone.count("forward") == 3
    assert [phase for phase in both if phase != "reference"] == alone


def test_the_reference_of_fsdp1_runs_the_hooks_of_a_forward() -> None:
    ops = zsim.make_plan(experiment("copy", "fsdp1")).programs[0].ops
    hooks = {op.overhead for op in ops if op.phase == "reference" and op.name.startswith("unshard ")}
    assert hooks == {"fsdp1_forward"}


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_a_sharded_copy_keeps_its_root_gathered(kind: str) -> None:
    """No backward reshards the root, whose weights are those outside of the 12 blocks of 7,087,872. The
    shards of the copy are a half of it.
    """
    alone, both = peaks(experiment(None, kind)), peaks(experiment("copy", kind))
    assert both["parameters"] - alone["parameters"] == pytest.approx(4 * NUMEL / 2, rel=1e-3)
    root = 2 * (NUMEL - 12 * 7_087_872)
    assert both["buffers"] - alone["buffers"] == pytest.approx(root, rel=0.2)


def with_stage(reference: str | None, stage: int, **strategy: Any) -> zsim.Experiment:
    data = experiment(reference, "deepspeed").model_dump(exclude_unset=True)
    data["strategy"] |= {"stage": stage, **strategy}
    return zsim.Experiment(**data)


def test_a_copy_under_zero_3_is_an_engine_that_runs_forward_alone() -> None:
    """It gathers the last block once a micro-batch, and nothing for a backward that does not come."""
    alone, both = gathers(with_stage(None, 3)), gathers(with_stage("copy", 3))
    assert both.count("reference") == alone.count("forward")
    shards = peaks(with_stage(None, 3))["parameters"]
    assert peaks(with_stage("copy", 3))["parameters"] == pytest.approx(2 * shards, rel=1e-4)


def test_a_fused_loss_of_a_copy_gathers_the_head_anew_in_every_micro_batch() -> None:
    """Under ZeRO-3 the model itself reads it, and a forward without a backward releases it at its end."""
    liger = {"training.cross_entropy": "liger"}
    alone, both = (gathers(change_experiment(with_stage(model, 3), liger)) for model in (None, "copy"))
    assert both.count("reference") == alone.count("forward")
    assert alone.count("forward") % 3 == 0


def plan_with(gpus: int, strategy: dict[str, Any]) -> zsim.Plan:
    data = experiment("copy").model_dump(exclude_unset=True)
    plan = zsim.make_plan(zsim.Experiment(**{**data, "gpus": gpus, "strategy": strategy}))
    check_plan(plan)
    return plan


def zero_3(version: str = "0.19.8", **zero: Any) -> dict[str, Any]:
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, **zero}}
    return {"kind": "deepspeed", "version": version, "config": config}


@pytest.mark.parametrize(("version", "kept"), [("0.19.8", NUMEL - 121_344), ("0.12.6", 2 * NUMEL)])
def test_a_copys_secondary_shards_stay(version: str, kept: int) -> None:
    """No step drops those of hpZ over 2 ranks, 2 bytes an element: of all but the vectors, which stay
    gathered, and before 0.13.2 of everything, of the trained model too.
    """
    resident = [m.bytes for m in plan_with(4, zero_3(version, zero_hpz_partition_size=2)).resident if m.bytes]
    plain = [m.bytes for m in plan_with(4, zero_3(version)).resident if m.bytes]
    assert sum(resident) - sum(plain) == kept


def test_a_copys_quantized_gathers_read_secondary_shards() -> None:
    strategy = zero_3(zero_hpz_partition_size=2, zero_quantized_weights=True)
    works = [op.work for op in plan_with(4, strategy).ops if op.phase == "reference"]
    assert {work.group for work in works if isinstance(work, Collective)} == {"hpz"}


def test_a_copys_shards_over_fewer_ranks_stay() -> None:
    """Every forward gathers a block from those that the last one left: 2 bytes of 7,087,872 over 2 ranks."""
    plan = plan_with(4, {"kind": "fsdp2", "reshard_after_forward": 2})
    gathers = [
        op.work for op in plan.ops if op.phase == "reference" and op.name == "all_gather transformer.h.5"
    ]
    assert [work.bytes for work in gathers if isinstance(work, Collective)] == [2 * 7_087_872] * 3
    assert {plan.groups[work.group].size for work in gathers if isinstance(work, Collective)} == {2}


@pytest.mark.parametrize("reference", ["copy", "base"])
def test_shards_over_fewer_ranks_stay_where_no_backward_comes(reference: str) -> None:
    """Blocks before the first adapter have no backward: their shards are there between steps."""
    data = experiment(reference, "fsdp2", lora={"rank": 8, "layers": [8, 9]}).model_dump(exclude_unset=True)
    data["strategy"]["reshard_after_forward"] = 2
    assert zsim.simulate(zsim.Experiment(**{**data, "gpus": 4})).report.step_seconds > 0


def test_a_copy_that_deep_compile_gathers_is_refused() -> None:
    strategy = zero_3()
    strategy["config"]["compile"] = {"deepcompile": True}
    with pytest.raises(NotSimulatedError, match="a copy that DeepCompile gathers"):
        plan_with(4, strategy)


def test_a_base_under_zero_3_breaks_the_recorded_order() -> None:
    data = with_stage(None, 3).model_dump(exclude_unset=True)
    data["training"] |= {"reference": "base", "lora": {"rank": 8}}
    with pytest.raises(NotSimulatedError, match="two forwards of one engine with ZeRO stage 3"):
        resolve(zsim.Experiment(**data))


def test_a_base_under_fsdp2_is_gathered_again() -> None:
    job = experiment("base", "fsdp2", lora={"rank": 8})
    assert gathers(job).count("reference") == 3
    assert peaks(job)["parameters"] == peaks(experiment(None, "fsdp2", lora={"rank": 8}))["parameters"]


def staged_plan(reference: str | None, forwards: int = 1) -> zsim.Plan:
    data = experiment(reference, "megatron", reference_forwards=forwards).model_dump(exclude_unset=True)
    plan = zsim.make_plan(zsim.Experiment(**data, parallelism={"pipeline": 2}))
    check_plan(plan)
    return plan


def sent(plan: zsim.Plan) -> set[int]:
    ops = plan.programs[0].ops
    works = [getattr(ops[number].work, "messages", ()) for number in range(len(ops))]
    return {message.bytes for messages in works for message in messages}


def test_megatrons_stages_run_it_first_and_send_both() -> None:
    """As Megatron-SWIFT does: one tensor has the activations of both models, and of KTO's four forwards."""
    assert {2 * size for size in sent(staged_plan(None))} == sent(staged_plan("copy")) != set()
    assert {4 * size for size in sent(staged_plan(None))} == sent(staged_plan("copy", 3))
    ops = staged_plan("copy").programs[0].ops
    products = [
        ops[number] for number in range(len(ops)) if ops[number].name.startswith("transformer.h.0.mlp")
    ]
    assert [op.phase for op in products[:1]] == ["reference"]
    data = with_stage("copy", 1).model_dump(exclude_unset=True)
    with pytest.raises(NotSimulatedError, match=r"training\.reference: not simulated with model parallelism"):
        resolve(zsim.Experiment(**data, parallelism={"pipeline": 2}))


def test_the_messages_of_all_forwards_stay_whole_until_backward() -> None:
    """4 x 512 tokens of 768 elements in bf16, four times in KTO: the second stage allocates what it receives
    and later a gradient of that size, of which the model's forward frees its own part alone.
    """
    message = 2 * 4 * 512 * 768

    def changes(owner: str, forwards: int) -> list[int]:
        memory = staged_plan("copy", forwards).programs[1].memory
        return [change.bytes for change in memory if change.owner == owner and change.micro_batch == 0]

    assert changes("input of stage 1", 1) == [2 * message, -message, -message]
    assert changes("input of stage 1", 3) == [4 * message, -message, -3 * message]
    gradient = changes("gradient of the residual stream", 3)
    assert gradient[-2:] == [3 * message, -4 * message]


def test_nanotron_is_refused_by_its_name() -> None:
    data = experiment("copy", "megatron").model_dump(exclude_unset=True)
    data["strategy"] = {"kind": "megatron", "engine": "nanotron"}
    with pytest.raises(
        NotSimulatedError, match=r"not simulated with strategy\.engine 'nanotron'; expected it"
    ):
        resolve(zsim.Experiment(**data))


def test_shards_on_the_host_are_refused() -> None:
    data = experiment("copy", "fsdp2").model_dump(exclude_unset=True)
    with pytest.raises(NotSimulatedError, match="a reference whose shards are on the host"):
        resolve(zsim.Experiment(**{**data, "strategy": {"kind": "fsdp2", "cpu_offload": True}}))


def test_kto_asks_three_times() -> None:
    plan = zsim.make_plan(experiment("copy", reference_forwards=3))
    ops = [plan.programs[0].ops[number] for number in range(len(plan.programs[0].ops))]
    assert sum(op.name == "transformer.h.0.attn.c_attn of the reference" for op in ops) == 3 * 3
    assert peaks(experiment("copy", reference_forwards=3)) == peaks(experiment("copy"))
    with pytest.raises(InputError, match=r"reference_forwards: found 3 without training\.reference"):
        resolve(experiment(None, reference_forwards=3))
