"""Defaults and keys by DeepSpeed release, read in the released sources 0.8.2 to 0.19.8."""

from __future__ import annotations

from typing import Any

import pytest

from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.settings.effects import describe_settings
from zsim.frameworks.deepspeed.settings.load import load_deepspeed_config
from zsim.frameworks.deepspeed.settings.release import CHANGES, NEWEST, OLDEST, parse_release
from zsim.frameworks.deepspeed.settings.zero_schema import ZERO_KEYS


def load(config: dict[str, Any], version: str = "0.19.8", **options: Any) -> DeepSpeedConfig:
    return load_deepspeed_config(
        {"train_micro_batch_size_per_gpu": 1, **config},
        name="ds.json",
        world_size=8,
        hidden_size=4096,
        version=version,
        **options,
    )


def bf16(stage: int, accumulate: str | None = None, **zero: Any) -> dict[str, Any]:
    data_types = {} if accumulate is None else {"data_types": {"grad_accum_dtype": accumulate}}
    return {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage, **zero}, **data_types}


@pytest.mark.parametrize(
    ("version", "clipping"), [("0.10.3", 0.0), ("0.19.2", 0.0), ("0.19.3", 1.0), ("0.19.8", 1.0)]
)
def test_gradients_are_clipped_by_default_since_0_19_3(version: str, clipping: float) -> None:
    assert load(bf16(2), version).gradient_clipping == clipping


@pytest.mark.parametrize(("version", "pinned"), [("0.16.4", False), ("0.19.4", False), ("0.19.5", True)])
def test_offloaded_memory_is_pinned_by_default_since_0_19_5(version: str, pinned: bool) -> None:
    device = {"device": "cpu"}
    zero = load(bf16(3, offload_param=device, offload_optimizer=device), version).zero
    assert zero.offload_param is not None
    assert zero.offload_optimizer is not None
    assert (zero.offload_param.pin_memory, zero.offload_optimizer.pin_memory) == (pinned, pinned)


@pytest.mark.parametrize(
    ("version", "events"),
    [("0.9.3", "_before_0_19_1"), ("0.19.0", "_before_0_19_1"), ("0.19.1", ""), ("0.19.8", "")],
)
def test_hooks_of_modules_change_with_0_19_1(version: str, events: str) -> None:
    """parameter_offload.py of 0.19.0 is that of 0.18.9. #7916 of 0.19.1 remakes its autograd functions."""
    assert load({}, version).release.module_hooks == events


@pytest.mark.parametrize(
    ("version", "multi_rank", "in_buckets"), [("0.12.2", False, True), ("0.12.4", True, False)]
)
def test_stage_2_reduces_per_owner_and_gathers_in_buckets_before_0_12_4(
    version: str, multi_rank: bool, in_buckets: bool
) -> None:
    config = load(bf16(2, allgather_bucket_size=2e8), version)
    assert config.zero.use_multi_rank_bucket_allreduce is multi_rank
    assert config.release.gathers_step_in_buckets is in_buckets
    assert bool(config.notes) is not in_buckets


@pytest.mark.parametrize(
    ("version", "stage", "checks"),
    [
        ("0.10.3", 2, True),
        ("0.10.3", 3, True),
        ("0.16.9", 2, False),
        ("0.19.2", 2, False),
        ("0.19.3", 1, True),
        ("0.19.8", 2, True),
        ("0.19.8", 3, False),
        ("0.19.8", 0, True),
    ],
)
def test_overflow_in_bf16_gradients_is_looked_for_by_stage_and_release(
    version: str, stage: int, checks: bool
) -> None:
    """stage_1_and_2.py asks bf16.check_grad_overflow since 0.17.1, default true since 0.19.3; stage3.py asks
    only in fp16; FP16_Optimizer (stage 0) always does."""
    assert load(bf16(stage), version).check_grad_overflow is checks


def test_the_overflow_key_is_obeyed_where_it_is_read() -> None:
    off = {"bf16": {"enabled": True, "check_grad_overflow": False}}
    config = load({**off, "zero_optimization": {"stage": 2}})
    assert (config.check_grad_overflow, config.notes) == (False, ())
    config = load({**off, "zero_optimization": {"stage": 3}})
    assert "check_grad_overflow: no effect outside stages 1 and 2" in config.notes[0]
    on = {"bf16": {"enabled": True, "check_grad_overflow": True}, "zero_optimization": {"stage": 2}}
    assert load(on, "0.17.1").check_grad_overflow
    assert not load(on, "0.17.0").check_grad_overflow


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp16_always_looks_for_overflow_and_fp32_never(stage: int) -> None:
    zero = {"zero_optimization": {"stage": stage}}
    fp16 = load({**zero, "fp16": {"enabled": True}})
    assert fp16.check_grad_overflow
    assert not load(zero).check_grad_overflow
    assert load(zero).precision == "fp32"


def test_a_static_loss_scale_changes_nothing_of_the_step() -> None:
    config = load({"fp16": {"enabled": True, "loss_scale": 128}})
    assert config == load({"fp16": {"enabled": True}})


@pytest.mark.parametrize(
    ("version", "stage", "accumulate", "wrapper", "resolved"),
    [
        ("0.19.8", 0, None, "fp16_optimizer", "bf16"),
        ("0.19.8", 1, None, "zero12", "bf16"),
        ("0.19.8", 1, "fp32", "bf16_optimizer", "fp32"),
        ("0.19.8", 2, "fp32", "zero12", "fp32"),
        ("0.19.8", 3, "fp32", "zero3", "fp32"),
        ("0.18.5", 1, "fp32", "bf16_optimizer", "fp32"),
        ("0.18.4", 1, "fp32", "fp16_optimizer", "fp32"),
        ("0.17.6", 0, "fp32", "fp16_optimizer", "fp32"),
        ("0.17.6", 0, None, "fp16_optimizer", "bf16"),
        ("0.17.5", 0, None, "bf16_optimizer", "fp32"),
        ("0.17.5", 1, "fp32", "bf16_optimizer", "fp32"),
        ("0.10.3", 0, "float32", "bf16_optimizer", "fp32"),
    ],
)
def test_the_optimizer_wrapper_in_bf16_by_release(
    version: str, stage: int, accumulate: str | None, wrapper: str, resolved: str
) -> None:
    """engine.py: _do_optimizer_sanity_check and get_data_types; #7515 (0.17.6), #7788 and #7790 (0.18.5)."""
    config = load(bf16(stage, accumulate), version)
    assert (config.optimizer_wrapper, config.grad_accum_dtype) == (wrapper, resolved)


@pytest.mark.parametrize(
    ("version", "accumulate", "expected"), [("0.19.8", "fp32", "bf16"), ("0.17.5", "bf16", "fp32")]
)
def test_other_accumulation_without_zero_is_refused(version: str, accumulate: str, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        load(bf16(0, accumulate), version)
    assert str(caught.value) == (
        f"ds.json: data_types.grad_accum_dtype: found {accumulate}, expected {expected} for bf16 weights at "
        f"stage 0 of DeepSpeed {version}"
    )


def test_offload_keeps_the_zero_optimizer_in_spite_of_fp32_accumulation() -> None:
    config = load(bf16(1, "fp32", offload_optimizer={"device": "cpu"}))
    assert config.optimizer_wrapper == "zero12"


def test_fp32_and_fp16_without_zero() -> None:
    assert load({}).optimizer_wrapper == "none"
    assert load({"fp16": {"enabled": True}}).optimizer_wrapper == "fp16_optimizer"


def test_zero_buckets_do_nothing_in_bf16_optimizer() -> None:
    config = load(bf16(1, "fp32", reduce_bucket_size=1e8))
    assert config.notes == (
        "ds.json: zero_optimization: reduce_bucket_size: no effect: BF16_Optimizer reduces without ZeRO's "
        "buckets",
    )


def test_immediate_gradient_updates_are_for_bf16_optimizer() -> None:
    bf16_block = {"bf16": {"enabled": True, "immediate_grad_update": True}}
    assert load({**bf16(1, "fp32"), **bf16_block}).notes == ()
    assert load({**bf16(1), **bf16_block}).notes == (
        "ds.json: bf16.immediate_grad_update: no effect outside BF16_Optimizer",
    )


def test_releases_that_take_the_wrong_wrapper_say_so() -> None:
    assert any("mended in 0.18.5" in note for note in load(bf16(1, "fp32"), "0.18.4").notes)
    assert any("shards like stage 1" in note for note in load(bf16(0), "0.16.9").notes)
    assert load(bf16(1), "0.18.4").notes == ()
    assert load(bf16(1, "fp32"), "0.18.5").notes == ()


@pytest.mark.parametrize(
    ("key", "value", "before", "since"),
    [
        ("use_multi_rank_bucket_allreduce", True, "0.12.2", "0.12.4"),
        ("stage3_use_all_reduce_for_fetch_params", True, "0.14.0", "0.14.1"),
        ("module_granularity_threshold", 10, "0.15.4", "0.16.0"),
        ("leaf_module", {"names": ["experts"]}, "0.17.6", "0.18.0"),
        ("stage3_allgather_sequential", True, "0.18.4", "0.18.5"),
        ("compute_grad_norm", True, "0.19.6", "0.19.7"),
    ],
)
def test_a_key_is_refused_before_the_release_it_came_with(
    key: str, value: Any, before: str, since: str
) -> None:
    with pytest.raises(InputError) as caught:
        load(bf16(3, **{key: value}), before)
    assert str(caught.value) == (
        f"ds.json: zero_optimization.{key}: DeepSpeed {before} does not know it; it came with {since}"
    )
    load(bf16(3, **{key: value}), since)
    config = load(bf16(3, **{key: value}), before, lenient=True)
    assert config.notes[0].endswith(f"it came with {since}; ignored")


@pytest.mark.parametrize(
    ("config", "key", "gone", "last"),
    [
        (bf16(3, mics_shard_size=4), "zero_optimization.mics_shard_size", "0.19.7", "0.19.6"),
        (bf16(3, zeropp_loco_param={}), "zero_optimization.zeropp_loco_param", "0.19.8", "0.19.7"),
        ({"amp": {"enabled": False}}, "amp", "0.19.8", "0.19.7"),
        ({"sparse_attention": False}, "sparse_attention", "0.19.7", "0.19.6"),
        ({"elasticity": {"enabled": False}}, "elasticity", "0.19.8", "0.19.7"),
    ],
)
def test_a_key_is_refused_after_its_removal(config: dict[str, Any], key: str, gone: str, last: str) -> None:
    with pytest.raises(InputError) as caught:
        load(config)
    assert str(caught.value) == (
        f"ds.json: {key}: removed from DeepSpeed in {gone}, and 0.19.8 refuses it; expected the "
        f"key to be left out, or [strategy] version '{last}'"
    )
    load(config, last)
    assert load(config, lenient=True).notes == (f"ds.json: {key}: removed from DeepSpeed in {gone}; ignored",)


@pytest.mark.parametrize(
    ("config", "feature"),
    [
        ({"compression_training": {"x": {"shared_parameters": {"enabled": True}}}}, "quantising or pruning"),
        ({"sparse_attention": {"mode": "fixed"}}, "block-sparse attention"),
        ({"curriculum_learning": {"enabled": True}}, "sequence lengths that change"),
    ],
)
def test_a_removed_method_that_no_release_is_simulated_with_is_refused_at_once(
    config: dict[str, Any], feature: str
) -> None:
    """An older release would be refused next."""
    with pytest.raises(
        NotSimulatedError, match=rf"{feature}.* of any release; expected the key to be left out"
    ):
        load(config)


def test_a_removed_key_is_in_force_before() -> None:
    assert load(bf16(3, mics_shard_size=4), "0.19.6").zero.is_mics
    with pytest.raises(InputError, match="mics_shard_size: found 3, expected a divisor of the 8 GPUs"):
        load(bf16(3, mics_shard_size=3), "0.19.6")


def test_the_settings_list_only_keys_of_the_release() -> None:
    keys = {row.key for row in describe_settings(load(bf16(3), "0.10.3"), 1)}
    assert "zero_optimization.mics_shard_size" in keys
    assert "zero_optimization.leaf_module" not in keys
    assert {row.origin for row in describe_settings(load(bf16(3), "0.10.3"), 1)} >= {"default 0.10.3"}


def test_a_reduce_bucket_of_nothing_was_allowed_before_0_19_6() -> None:
    assert load(bf16(2, reduce_bucket_size=0), "0.19.5").zero.reduce_bucket_size == 0
    with pytest.raises(InputError, match="reduce_bucket_size: found 0"):
        load(bf16(2, reduce_bucket_size=0), "0.19.6")


def test_aio_threads_changed_their_name() -> None:
    offload: dict[str, Any] = {"offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}
    old, new = {"aio": {"thread_count": 4}}, {"aio": {"intra_op_parallelism": 4}}
    assert load({**bf16(3, **offload), **old}, "0.14.5").aio.intra_op_parallelism == 4
    assert load({**bf16(3, **offload), **new}).aio.intra_op_parallelism == 4
    assert load({**bf16(3, **offload), **new}, "0.16.4").aio.intra_op_parallelism == 4
    assert load({**bf16(3, **offload), **old}, "0.16.3").aio.intra_op_parallelism == 4
    wrong = load({**bf16(3, **offload), **old})
    assert wrong.aio.intra_op_parallelism == 1
    assert wrong.notes == (
        "ds.json: aio.thread_count: DeepSpeed 0.19.8 reads 'intra_op_parallelism'; no effect",
    )


def test_one_bit_optimizers_left_with_0_19_7_and_never_went_with_zero() -> None:
    one_bit = {"optimizer": {"type": "OneBitAdam"}, "fp16": {"enabled": True}}
    assert load(one_bit, "0.19.6").one_bit is not None
    with pytest.raises(InputError, match=r"no 'OneBitAdam' since 0.19.7; expected strategy.version '0.19.6'"):
        load(one_bit)
    with pytest.raises(InputError, match="does not go with ZeRO; expected stage 0, found 1"):
        load({**one_bit, "zero_optimization": {"stage": 1}}, "0.19.6")


@pytest.mark.parametrize("version", ["0.8.1", "0.7.7", "0.9.6", "0.19.9", "0.20.0", "1.0.0", "0.13.9"])
def test_releases_zsim_does_not_know_are_refused(version: str) -> None:
    with pytest.raises(InputError) as caught:
        load({}, version)
    assert str(caught.value) == (
        f"[strategy] version: DeepSpeed {version} is not known to zsim; expected 0.8.2 to 0.19.8"
    )


@pytest.mark.parametrize("version", ["latest", "19", "", "0.19.8rc1", "0.19+cu128"])
def test_what_is_no_release_is_refused(version: str) -> None:
    with pytest.raises(InputError, match=r"is not a DeepSpeed release; expected 0.8.2 to 0.19.8"):
        load({}, version)


def test_a_local_build_counts_as_its_release() -> None:
    assert load({}, "v0.19.2+cu128").version == "0.19.2"


def test_a_release_without_its_patch_is_the_last_of_them() -> None:
    assert load({}, "0.16").version == "0.16.9"
    assert load({}, "0.8").version == "0.8.3"


@pytest.mark.parametrize(
    ("version", "dtype"), [("0.8.3", "fp16"), ("0.9.0", "fp32"), ("0.9.1", "fp32"), ("0.9.2", "bf16")]
)
def test_gradients_in_bf16_are_reduced_in_their_dtype_since_0_9_2(version: str, dtype: str) -> None:
    """`DeepSpeedEngine.communication_data_type` at the tags v0.8.3, v0.9.0, v0.9.1 and v0.9.2."""
    assert [load(bf16(stage), version).communication_dtype for stage in (1, 2, 3)] == [dtype] * 3


@pytest.mark.parametrize(
    ("version", "zero"),
    [
        ("0.8.3", {"mics_shard_size": 8}),
        ("0.9.1", {"mics_shard_size": 8}),
        ("0.9.5", {"zero_hpz_partition_size": 8}),
        ("0.10.1", {"zero_quantized_nontrainable_weights": True}),
    ],
)
def test_keys_of_later_releases_are_refused(version: str, zero: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(zero))):
        load(bf16(3, **zero), version)


def test_zero_accumulates_in_another_dtype_since_0_10_1() -> None:
    assert load(bf16(2, "fp32"), "0.10.1").version == "0.10.1"
    with pytest.raises(InputError, match=r"grad_accum_dtype: found 'fp32' with ZeRO and bf16"):
        load(bf16(2, "fp32"), "0.10.0")


def test_the_copies_of_cpu_adam_before_0_9_0_are_refused() -> None:
    fp16 = {"fp16": {"enabled": True}}
    zero = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    assert load(fp16 | zero, "0.9.0").version == "0.9.0"
    with pytest.raises(InputError, match="from within its CPU Adam, which is not simulated"):
        load(fp16 | zero, "0.8.3")


def test_every_change_has_a_source_and_falls_between_two_known_releases() -> None:
    oldest, newest = parse_release(OLDEST, "").number, parse_release(NEWEST, "").number
    for name, change in CHANGES.items():
        assert change.source, name
        moved = [edge for edge in (change.since, change.until) if (0, 0, 0) < edge < (1, 0, 0)]
        assert moved, name
        assert all(oldest < edge <= newest for edge in moved), name


def test_a_release_has_the_value_of_each_change() -> None:
    """0.12.4 is the last change of stages 1 and 2 that 0.13.1 has; the next, of 0.13.2, it has not."""
    release = parse_release("0.13.1", "")
    assert (release.reduces_slice_by_slice, release.makes_states_in_first_step) == (False, False)
    assert (release.aio_threads_key, release.default_gradient_clipping) == ("thread_count", 0.0)
    assert (str(release), load({}, "0.13.1").release) == ("0.13.1", release)


def test_the_gathers_bucket_does_something_before_0_12_4() -> None:
    effects = [
        {row.key: row.effect for row in describe_settings(load(bf16(2), version), 1)}[
            "zero_optimization.allgather_bucket_size"
        ]
        for version in ("0.12.2", "0.12.4")
    ]
    assert effects == [
        "elements that the step gathers at a time",
        "no effect: the step gathers in one piece since 0.12.4",
    ]


def test_keys_are_known_by_release_and_have_an_effect_or_none_at_any_stage() -> None:
    newest = parse_release(NEWEST, "")
    gone = {bare for bare, key in ZERO_KEYS.items() if not key.is_known(newest)}
    assert gone == {"mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"}
    silent = {bare for bare, key in ZERO_KEYS.items() if not key.effect}
    assert silent == {
        "load_from_fp32_weights", "elastic_checkpoint", "ignore_unused_parameters", "legacy_stage1",
        "cpu_offload_use_pin_memory", "pipeline_loading_checkpoint", "override_module_apply",
        "log_trace_cache_warnings", "save_muon_momentum_buffer_in_memory",
    }  # fmt: skip
