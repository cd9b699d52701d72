"""`strategy.kind = "megatron"`: its keys, its releases, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from zsim.errors import InputError
from zsim.frameworks.megatron.settings.config import MegatronConfig
from zsim.specs.experiment.job import Job, strategy_label
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.formats.export import export_files


def job(training: dict[str, Any] | None = None, gpus: int = 64, model: str = "gpt2", **strategy: Any) -> Job:
    return resolve(
        Experiment(
            model=model, cluster="dgx-h100", gpus=gpus, training=training or {},
            strategy={"kind": "megatron", **strategy},
        )
    )  # fmt: skip


def megatron(**keys: Any) -> MegatronConfig:
    strategy = job(**keys).strategy
    assert isinstance(strategy, MegatronConfig)
    return strategy


def test_everything_is_off_as_on_the_command_line() -> None:
    strategy = megatron()
    assert not strategy.distributed_optimizer
    assert not strategy.overlap_grad_reduce
    assert not strategy.overlap_param_gather
    assert (strategy.grad_dtype, strategy.param_dtype, strategy.bucket_size) == ("fp32", "bf16", None)


@pytest.mark.parametrize(
    ("keys", "is_kept"),
    [
        ({}, True),
        ({"version": "0.12"}, False),
        ({"transformer_impl": "local"}, False),
        ({"gradient_accumulation_fusion": False}, False),
    ],
)
def test_placeholders_of_weights_come_with_transformer_engine_2_3(
    keys: dict[str, Any], is_kept: bool
) -> None:
    assert megatron(**keys).keeps_placeholders is is_kept


@pytest.mark.parametrize(("gpus", "expected"), [(8, 40_000_000), (64, 64_000_000)])
def test_a_bucket_has_forty_million_elements_or_one_per_rank_and_million(gpus: int, expected: int) -> None:
    assert megatron(gpus=gpus, overlap_grad_reduce=True).bucket_size == expected
    assert megatron(gpus=gpus, overlap_grad_reduce=True, bucket_size=5).bucket_size == 5


def test_the_vocabulary_is_padded_to_a_multiple_of_128() -> None:
    """GPT-2's 50,257 to 50,304: 47 rows of 768 more in the tied table, and 47 more logits."""
    padded = job().model
    plain = resolve(Experiment(model="gpt2", cluster="dgx-h100", gpus=8)).model
    assert (padded.vocab_size, padded.numel - plain.numel) == (50_304, 47 * 768)
    assert [
        module.op_spec.vocab_size for module in padded.after if hasattr(module.op_spec, "vocab_size")
    ] == [50_304]
    assert "Megatron pads the vocabulary of 50,257 to 50,304" in job().notes
    assert job(model="llama-2-7b").notes == ()


def test_its_kernels_loss_and_clipping_are_megatrons() -> None:
    training = job().training
    assert (training.compile, training.cross_entropy, training.gradient_clipping) == (True, "megatron", 1.0)
    assert job({"gradient_clipping": 0.0}).training.gradient_clipping == 0.0


@pytest.mark.parametrize(
    ("version", "is_contiguous", "fuses", "checks"),
    [
        ("1.0", False, False, False), ("2.5", False, False, False), ("2.6", True, False, False),
        ("3.0", True, False, False), ("0.4.0", True, True, True), ("0.16.1", True, True, True),
    ],
)  # fmt: skip
def test_a_release_keeps_adds_and_checks_gradients_as_it_did(
    version: str, is_contiguous: bool, fuses: bool, checks: bool
) -> None:
    """In bf16 as they come; 3.0 fuses only sums in fp32."""
    strategy = megatron(version=version, grad_reduce_dtype="bf16")
    found = strategy.is_contiguous, strategy.fuses_accumulation, strategy.checks_nan
    assert found == (is_contiguous, fuses, checks)
    assert megatron(version="3.0").fuses_accumulation
    assert megatron(version="2.4").is_contiguous  # fp32 sums of bf16 need a buffer of their own


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"version": "4.0"}, r"strategy\.version: found '4.0', expected a release of Megatron-Core from"),
        ({"version": "0.3.1"}, r"strategy\.version: found '0.3.1'"),
        ({"version": "latest"}, r"strategy\.version: found 'latest'"),
        ({"version": 0.16}, r"strategy\.version: .*in quotes"),
        ({"version": "2.6", "distributed_optimizer": True}, r"optimizer: Megatron 2.6 does not have"),
        ({"version": "3.0", "overlap_grad_reduce": True}, r"overlap_grad_reduce: Megatron 3.0 does not have"),
        (
            {"version": "0.9.0", "distributed_optimizer": True, "optimizer_instances": 2},
            r"optimizer_instances: Megatron 0.9.0 does not have",
        ),
        ({"overlap_param_gather": True}, r"strategy\.overlap_param_gather: .*expected both to be true"),
        ({"bucket_size": 10}, r"strategy\.bucket_size: found 10 without overlap_grad_reduce"),
        ({"optimizer_instances": 2}, r"strategy\.optimizer_instances: found 2 without distributed_optimizer"),
        (
            {"optimizer_instances": 3, "distributed_optimizer": True},
            r"strategy\.optimizer_instances: found 3, expected a divisor of 64 GPUs",
        ),
        ({"grad_reduce_dtype": "fp16"}, r"strategy\.grad_reduce_dtype: found 'fp16' with parameters in bf16"),
        ({"distributed_optimizer": "yes"}, r"strategy\.distributed_optimizer: .*'yes'"),
        ({"reshard_after_forward": True}, r"does not belong to kind 'megatron'; it is a key of fsdp2"),
        ({"distributed_optimiser": True}, r"unknown key 'distributed_optimiser'; did you mean"),
    ],
)  # fmt: skip
def test_what_megatron_would_refuse_is_refused_by_its_key(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        job(**keys)


def test_reports_call_it_by_its_optimizer() -> None:
    assert strategy_label(job()) == "Megatron DDP"
    assert strategy_label(job(distributed_optimizer=True)) == "Megatron, distributed optimizer"


def test_its_own_script_is_written_for_it_alone() -> None:
    exported = export_files(job(distributed_optimizer=True))
    assert set(exported.files) == {"experiment.toml", "megatron.sh"}
    assert exported.missing["megatron.py"] == "Megatron takes a command line"
    assert "torchtitan.toml" in exported.missing
    assert "accelerate.yaml" in exported.missing
