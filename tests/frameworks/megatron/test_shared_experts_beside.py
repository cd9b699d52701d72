"""Megatron's shared experts on a stream of their own, beside the exchanges of routed rows: in which order the
host launches, and who waits for whom (Megatron-Core 0.16.1 core/transformer/moe/shared_experts.py)."""

from __future__ import annotations

from typing import Any

import pytest

from zsim.engine.simulate import simulate_job
from zsim.errors import InputError, NotSimulatedError
from zsim.plan.make import make_plan
from zsim.plan.memory.tensors import device_peaks
from zsim.plan.ops import Kernels, Op, Plan
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

TOKENS, HIDDEN, LAYERS = 1024, 512, 2
MODEL: dict[str, Any] = {
    "model_type": "qwen2_moe", "hidden_size": HIDDEN, "intermediate_size": 1024,
    "moe_intermediate_size": 256, "shared_expert_intermediate_size": 512, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1024, "num_experts": 16,
    "num_experts_per_tok": 4, "tie_word_embeddings": False,
}  # fmt: skip
ALONE: dict[str, Any] = {"expert": 8, "dispatcher": "all-to-all"}
CUT: dict[str, Any] = {
    "expert": 4, "tensor": 2, "expert_tensor": 1, "sequence_parallel": True, "dispatcher": "all-to-all",
}  # fmt: skip
PREFIX = "model.layers.1."


def job(parallelism: dict[str, Any], *, overlaps: bool = True, **more: Any) -> Job:
    strategy = {"kind": "megatron", "moe_grouped_gemm": True, "overlap_shared_experts": overlaps}
    training = {"sequence_length": TOKENS, "activation_checkpointing": "none", **more.pop("training", {})}
    return resolve(
        Experiment(
            model=more.get("model", MODEL),
            cluster="dgx-h100",
            gpus=8,
            training=training,
            strategy=strategy | more.pop("strategy", {}),
            parallelism=parallelism,
        )
    )


def ops(plan: Plan, phase: str) -> list[Op]:
    """What one layer issues from its second norm on."""
    found = [one for one in plan.programs[0].ops if one.phase == phase and one.stream not in ("", "host")]
    return [one for one in found if one.name.startswith((f"{PREFIX}mlp", f"{PREFIX}post"))]


def names(found: list[Op], phase: str) -> list[str]:
    """Short names; of the stream beside with a star."""
    end = "" if phase == "forward" else " backward"
    return [
        one.name.removeprefix(PREFIX).removesuffix(end).removeprefix("mlp.") + "*" * (one.stream != "compute")
        for one in found
    ]


def test_forward_is_launched_as_the_dispatcher_calls_it() -> None:
    """`pre_forward_comm` before the permutation, `linear_fc1_forward_and_act` behind the exchange, then
    `linear_fc2_forward` and `post_forward_comm` behind the one back, `get_output` before the sum."""
    assert names(ops(make_plan(job(CUT)), "forward"), "forward") == [
        "post_attention_layernorm", "gate", "shared_expert_gate*", "shared_expert.linear_fc1 all_gather*",
        "experts.permute", "experts all_gather counts", "experts all_to_all rows",
        "experts all_to_all scores", "shared_expert.linear_fc1*", "shared_expert.act_fn*", "experts.sort",
        "experts.gate_up_proj", "experts.act_fn", "experts.down_proj", "experts.unsort",
        "experts all_to_all rows back", "shared_expert.down_proj*",
        "shared_expert.down_proj reduce_scatter*", "experts.unpermute", "experts.add", "residual",
    ]  # fmt: skip


def test_backward_takes_exchanges_first_and_then_what_ran_last() -> None:
    """With sequence numbers as the code sets them: scatter before the rows' sum, the exchange back before the
    second product, the exchange of rows before activation and first product, the gather before scores."""
    assert names(ops(make_plan(job(CUT)), "backward"), "backward") == [
        "residual", "experts.add", "shared_expert.down_proj reduce_scatter*", "experts.unpermute",
        "experts all_to_all rows back", "shared_expert.down_proj*", "experts.unsort", "experts.down_proj",
        "experts.act_fn", "experts.gate_up_proj", "experts.sort", "experts all_to_all rows",
        "shared_expert.act_fn*", "shared_expert.linear_fc1*", "shared_expert.linear_fc1 all_gather*",
        "experts all_to_all scores", "experts.permute", "shared_expert_gate*", "gate",
        "post_attention_layernorm",
    ]  # fmt: skip


@pytest.mark.parametrize("parallelism", [ALONE, CUT])
def test_the_streams_wait_at_both_ends_alone(parallelism: dict[str, Any]) -> None:
    """The first op beside waits for the router (forward) or the sum (backward); the sum, or the norm, for the
    last one. In between neither waits for the other."""
    plan = make_plan(job(parallelism))
    of_number = dict(enumerate(plan.programs[0].ops))
    for phase, before, joined in (("forward", "gate", "experts.add"), ("backward", "experts.add", "post_")):
        found = ops(plan, phase)
        beside = [one for one in found if one.stream == "shared experts"]
        waited = {
            one.name: [of_number[number] for number in one.after]
            for one in found
            if any(of_number[number].stream != one.stream for number in one.after)
        }
        on_compute = [one for one in waited.get(beside[0].name, []) if one.stream == "compute"]
        assert [one.name.removesuffix(" backward").endswith(f"mlp.{before}") for one in on_compute] == [True]
        sums = next(one for one in found if joined in one.name)
        assert beside[-1] in waited[sums.name]
        products = [named for named in beside[1:] if isinstance(named.work, Kernels)]
        assert products
        assert not any(one.stream == "compute" for named in products for one in waited.get(named.name, []))


def test_a_whole_input_is_kept_and_nothing_gathered_again() -> None:
    """One tensor of all tokens and hidden elements more than the half that is kept and gathered again."""
    peaks = [
        make_plan(job(CUT, overlaps=overlaps)).programs[0].memoize(device_peaks)["gpu"]
        for overlaps in (False, True)
    ]
    assert 0 < peaks[1] - peaks[0] <= LAYERS * TOKENS * HIDDEN * 2
    again = [one for one in make_plan(job(CUT)).programs[0].ops if "gather input" in one.name]
    assert not any("shared_expert" in one.name for one in again)


def test_it_takes_less_where_the_gpu_has_enough_to_do() -> None:
    model = {**MODEL, "hidden_size": 2048, "moe_intermediate_size": 1024, "num_attention_heads": 16}
    model |= {"shared_expert_intermediate_size": 2048, "num_key_value_heads": 16}
    training = {"sequence_length": 8192}
    seconds = [
        simulate_job(job(ALONE, overlaps=overlaps, model=model, training=training)).trace.step_seconds
        for overlaps in (False, True)
    ]
    assert seconds[1] < 0.99 * seconds[0]


@pytest.mark.parametrize(
    ("parallelism", "more", "error", "message"),
    [
        (
            {"expert": 8, "dispatcher": "all-gather"},
            {},
            InputError,
            "dispatcher 'all-gather'.*'all-to-all' alone",
        ),
        (
            ALONE,
            {"strategy": {"overlap_expert_parallel": True}},
            InputError,
            "overlap_expert_parallel = true, which Megatron refuses",
        ),
        (
            ALONE,
            {
                "training": {
                    "activation_checkpointing": "selective",
                    "recompute_modules": ["shared_experts"],
                }
            },
            InputError,
            "recompute_modules 'shared_experts'",
        ),
        (ALONE, {"strategy": {"fsdp_sharding": "optim"}}, NotSimulatedError, "Megatron-FSDP"),
        (ALONE, {"training": {"lora": {"rank": 8}}}, NotSimulatedError, "adapters on shared experts"),
    ],
)
def test_what_is_refused(
    parallelism: dict[str, Any], more: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        job(parallelism, **more)


def test_without_shared_experts_a_note_says_that_it_has_no_effect() -> None:
    """Megatron reads it with shared experts alone, and refuses no dispatcher then."""
    model = {**MODEL, "model_type": "qwen3_moe", "head_dim": 128}
    said = [job(ALONE | more, model=model).notes for more in ({}, {"dispatcher": "all-gather"})]
    assert all(any("overlap_shared_experts has no effect" in note for note in notes) for notes in said)
    assert not any("no effect" in note for note in job(ALONE).notes)


def test_adapters_on_attention_leave_shared_experts_beside() -> None:
    lora = {"lora": {"rank": 8, "targets": ["linear_qkv", "linear_proj"]}}
    found = names(ops(make_plan(job(ALONE, training=lora)), "forward"), "forward")
    assert sum(one.endswith("*") for one in found) > 0
