"""1-bit Adam, 1-bit LAMB and 0/1 Adam: phases, error buffers, and what is sent.

GPT-2 has N = 124,439,808 parameters. Over 16 GPUs a flat tensor is padded to a multiple of 16 x 16 = 256,
which N is: 486,093 times.
"""

from __future__ import annotations

from typing import Any

import pytest

import zsim
from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.plan.make import make_plan
from zsim.plan.ops import Collective
from zsim.specs.experiment.resolve import resolve

N = 124_439_808


def experiment_of(optimizer: str, step: int | None = None, **options: Any) -> zsim.Experiment:
    """GPT-2 in fp16 on 2 nodes of 8 V100."""
    params = options.pop("params", {})
    config = {
        "fp16": {"enabled": options.pop("fp16", True)}, "bf16": {"enabled": options.pop("bf16", False)},
        "optimizer": {"type": optimizer, "params": params},
    }  # fmt: skip
    strategy = {"kind": "deepspeed", "version": "0.19.6", "config": config, **options.pop("strategy", {})}
    if step is not None:
        strategy["optimizer_step"] = step
    training = {"sequence_length": 512, "micro_batch_size": 1}
    return zsim.Experiment(
        model="gpt2", cluster="aws-p3dn", nodes=2, training=training, strategy=strategy, **options
    )


def calls(experiment: zsim.Experiment) -> list[tuple[str, str, int]]:
    """Collectives of more than 64 bytes."""
    works = (op.work for op in make_plan(resolve(experiment)).programs[0].ops)
    return [
        (work.kind, work.dtype, work.bytes)
        for work in works
        if isinstance(work, Collective) and work.bytes > 64
    ]


def resident(optimizer: str, step: int | None = None) -> int:
    """Bytes of optimizer states with the masters."""
    report = zsim.simulate(experiment_of(optimizer, step)).report.to_dict()
    return int(report["peak_bytes"]["gpu"]["optimizer_states"])


FULL = [("all_reduce", "fp16", 2 * N)]
SIGNS = [("all_to_all", "uint8", N // 8), ("all_gather", "uint8", N // 8)]


@pytest.mark.parametrize("optimizer", ["OneBitAdam", "OneBitLamb"])
def test_signs_replace_gradients_from_the_freeze_step_on(optimizer: str) -> None:
    """`freeze_step` is compared with a count that is one ahead: step 100,000 is the first compressed one."""
    assert calls(experiment_of(optimizer, 1)) == calls(experiment_of(optimizer, 99_999)) == FULL
    assert calls(experiment_of(optimizer, 100_000)) == calls(experiment_of(optimizer)) == SIGNS
    assert calls(experiment_of(optimizer, 50, params={"freeze_step": 50})) == SIGNS


def test_a_compressed_step_sends_a_sixteenth() -> None:
    """15/16 of M/8 bytes twice and 15/16 of 16 fp32 scales twice, against 15/16 of 2 M bytes twice."""
    volumes = []
    for step in (1, 100_000):
        rows = zsim.simulate(experiment_of("OneBitAdam", step)).report.sent
        volumes.append(sum(row.inter_node_bytes_per_gpu + row.intra_node_bytes_per_gpu for row in rows))
    assert volumes[0] == pytest.approx(2 * 2 * N * 15 / 16, rel=1e-6)
    assert volumes[1] == pytest.approx(2 * (N / 8 + 64) * 15 / 16, rel=1e-5)


def test_zero_one_adam_updates_the_variance_in_intervals_that_double() -> None:
    """DeepSpeed's count is one ahead. Counts 2 to 17 are 16 updates with interval 1. Then every second, so
    that count 18 (step 17) updates and count 19 (step 18) reduces signs."""
    full = [calls(experiment_of("ZeroOneAdam", step)) == FULL for step in (1, 16, 17, 18, 19)]
    assert full == [True, True, True, False, True]


def test_frozen_steps_of_zero_one_adam_are_local_but_for_one_in_an_interval() -> None:
    """Frozen from count 7 on (`var_freeze_step` 5), interval 2 from count 9 on and 4, the longest, from 11
    on. Steps 6 and 7 (counts 7, 8) reduce, 8 (9) does not, 9 (10) does, 10 (11) does not, 11 (12) does,
    then 15."""
    params = {"var_freeze_step": 5, "local_step_scaler": 2, "local_step_clipper": 4}
    counts = {step: calls(experiment_of("ZeroOneAdam", step, params=params)) for step in range(6, 16)}
    assert [step for step, found in counts.items() if found == SIGNS] == [6, 7, 9, 11, 15]
    assert all(found in ([], SIGNS) for found in counts.values())
    strategy = resolve(experiment_of("ZeroOneAdam", params=params)).strategy
    assert isinstance(strategy, DeepSpeedConfig)
    assert strategy.one_bit is not None
    assert strategy.one_bit.step == 11


def test_error_buffers_are_a_copy_and_a_part_in_fp32() -> None:
    """Masters, m and v: 12 N. Errors: 4 N and 4 N / 16. LAMB keeps a fresh v too, 0/1 Adam a sum."""
    errors = 4 * N + 4 * N // 16
    assert resident("OneBitAdam", 1) == 12 * N
    assert resident("OneBitAdam") == 12 * N + errors
    assert resident("OneBitLamb", 1) == 16 * N
    assert resident("OneBitLamb") == 16 * N + errors
    assert resident("ZeroOneAdam", 1) == resident("ZeroOneAdam") == 16 * N + errors


def test_weights_in_fp32_are_compressed_one_by_one() -> None:
    """148 tensors, each padded to 256: biases of 768 and 2,304 elements are multiples already."""
    found = calls(experiment_of("OneBitAdam", fp16=False))
    sizes = [size for kind, _, size in found if kind == "all_to_all"]
    assert len(sizes) == 148
    assert sum(sizes) == N // 8


def test_decay_costs_five_passes() -> None:
    def seconds(decay: float) -> float:
        experiment = experiment_of("OneBitAdam", params={"weight_decay": decay})
        return float(zsim.simulate(experiment).report.to_dict()["step_seconds"])

    assert 0.002 < seconds(0.01) - seconds(0.0) < 0.005  # 5 x 4 N bytes at 700 to 900 GB/s: 3 ms


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"params": {"comm_backend_name": "mpi"}}, NotSimulatedError, "'mpi'.*expected 'nccl'"),
        ({"params": {"amsgrad": True}}, InputError, "no AMSGrad; expected false"),
        ({"params": {"freeze_steps": 3}}, InputError, "did you mean 'freeze_step'"),
        ({"strategy": {"version": "0.19.8"}}, InputError, "since 0.19.7; expected strategy.version '0.19.6'"),
        (
            {"fp16": False, "bf16": True, "strategy": {"version": "0.17.5"}},
            NotSimulatedError,
            "BF16_Optimizer.*expected fp16, or strategy.version '0.17.6'",
        ),
        ({"parallelism": {"tensor": 2}}, NotSimulatedError, "parallelism.tensor = 2; expected 1"),
    ],
)
def test_refusals_name_the_way_out(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_plan(resolve(experiment_of("OneBitAdam", **change)))


def test_steps_of_other_optimizers_are_all_alike() -> None:
    with pytest.raises(InputError, match=r"optimizer_step: found 3.*expected optimizer.type OneBitAdam"):
        resolve(experiment_of("Adam", 3))


@pytest.mark.parametrize("kind", ["fsdp2", "ddp", "deepspeed"])
def test_the_optimizer_belongs_to_deepspeed_and_its_file(kind: str) -> None:
    strategy = {"kind": kind, **({"stage": 0} if kind == "deepspeed" else {})}
    with pytest.raises(InputError, match=r"'deepspeed'|expected it as optimizer\.type"):
        resolve(
            zsim.Experiment(
                model="gpt2",
                cluster="aws-p3dn",
                nodes=1,
                training={"optimizer": "onebitadam"},
                strategy=strategy,
            )
        )


def test_the_written_file_keeps_the_optimizer(tmp_path: Any) -> None:
    from zsim.programs.deepspeed.write import deepspeed_object

    params = {"freeze_step": 10}
    written = deepspeed_object(resolve(experiment_of("OneBitAdam", params=params)))
    assert written["optimizer"] == {"type": "OneBitAdam", "params": params}
