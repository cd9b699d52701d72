"""DeepSpeed JSONs as people write them, and what they mean.

Expected values are the defaults of DeepSpeed 0.19.8's source (zero/config.py, precision_config.py,
constants.py) unless a test says otherwise; sizes are elements.
"""

from __future__ import annotations

from typing import Any

import pytest

from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.settings.config import BatchSizes, DeepSpeedConfig, TrainingValues
from zsim.frameworks.deepspeed.settings.load import load_deepspeed_config
from zsim.frameworks.deepspeed.settings.unsimulated import refuse_unsimulated

HIDDEN = 4096


def load(config: dict[str, Any], **options: Any) -> DeepSpeedConfig:
    options.setdefault("world_size", 8)
    options.setdefault("hidden_size", HIDDEN)
    return load_deepspeed_config({"train_micro_batch_size_per_gpu": 1, **config}, name="ds.json", **options)


def zero(stage: int, /, **keys: Any) -> dict[str, Any]:
    return {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage, **keys}}


HUGGING_FACE_STAGE_3 = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "offload_param": {"device": "none", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


@pytest.mark.parametrize(("stage", "overlaps"), [(0, False), (1, False), (2, False), (3, True)])
def test_communication_overlaps_by_default_at_stage_3_only(stage: int, overlaps: bool) -> None:
    assert load(zero(stage)).zero.overlap_comm is overlaps
    assert load(zero(stage, overlap_comm=None)).zero.overlap_comm is overlaps
    assert load(zero(stage, overlap_comm=not overlaps)).zero.overlap_comm is not overlaps


def test_auto_is_filled_as_hugging_face_fills_it() -> None:
    """h = 4096: h*h = 16,777,216; int(0.9*h*h) = 15,099,494; 10*h = 40,960."""
    config = load(HUGGING_FACE_STAGE_3, training=TrainingValues(micro_batch_size=2, precision="bf16"))
    assert config.zero.reduce_bucket_size == 16_777_216
    assert config.zero.prefetch_bucket_size == 15_099_494
    assert config.zero.param_persistence_threshold == 40_960
    assert config.batch == BatchSizes(16, 2, 1)
    assert config.precision == "bf16"
    assert config.gradient_clipping == 1.0
    assert config.optimizer.name == "adamw"
    assert config.zero.offload_param is None
    assert config.notes == (
        "ds.json: 'auto' is taken as train_batch_size 16, train_micro_batch_size_per_gpu 2, "
        "gradient_accumulation_steps 1, gradient_clipping 1.0, stage3_param_persistence_threshold 40,960, "
        "stage3_prefetch_bucket_size 15,099,494, reduce_bucket_size 16,777,216",
    )
    refuse_unsimulated(config)


def test_what_auto_leaves_open_is_not_what_the_file_says() -> None:
    config = load(HUGGING_FACE_STAGE_3)
    assert "file" not in [
        dict(config.origins)[key]
        for key in (
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "precision",
            "gradient_clipping",
        )
    ]


def test_auto_precision_follows_the_experiment_then_the_gpu() -> None:
    assert load(HUGGING_FACE_STAGE_3, training=TrainingValues(precision="fp16")).precision == "fp16"
    assert load(HUGGING_FACE_STAGE_3, training=TrainingValues(auto_precision="fp16")).precision == "fp16"
    assert load(HUGGING_FACE_STAGE_3).precision == "bf16"
    assert load({"fp16": {"enabled": "auto"}}).precision == "fp16"


def test_auto_that_hugging_face_fills_at_stage_3_only_is_the_default_at_stage_2() -> None:
    config = load(zero(2, reduce_bucket_size="auto", stage3_prefetch_bucket_size="auto"))
    assert config.zero.reduce_bucket_size == 16_777_216
    assert config.zero.prefetch_bucket_size == 50_000_000
    assert config.notes == (
        "ds.json: zero_optimization.stage3_prefetch_bucket_size: 'auto' that nobody fills "
        "is DeepSpeed's default",
        "ds.json: 'auto' is taken as reduce_bucket_size 16,777,216",
    )


def test_bare_names_and_stage3_names_are_the_same_keys() -> None:
    one = load(zero(3, stage3_prefetch_bucket_size=7, stage3_max_live_parameters=8))
    other = load(zero(3, prefetch_bucket_size=7, max_live_parameters=8))
    assert one.zero == other.zero
    assert one.zero.prefetch_bucket_size == 7
    with pytest.raises(InputError, match="'prefetch_bucket_size' and 'stage3_prefetch_bucket_size'"):
        load(zero(3, stage3_prefetch_bucket_size=7, prefetch_bucket_size=7))


def test_bare_auto_is_filled_too() -> None:
    assert load(zero(3, prefetch_bucket_size="auto")).zero.prefetch_bucket_size == 15_099_494


def test_floats_that_are_whole_are_whole_numbers() -> None:
    config = load(zero(2, reduce_bucket_size=5e8))
    assert config.zero.reduce_bucket_size == 500_000_000
    assert isinstance(config.zero.reduce_bucket_size, int)


@pytest.mark.parametrize(("legacy", "stage"), [(True, 1), (False, 0)])
def test_a_boolean_zero_optimization_is_stage_1_or_0(legacy: bool, stage: int) -> None:
    config = load({"zero_optimization": legacy, "fp16": {"enabled": True}})
    assert config.stage == stage
    assert "old way" in config.notes[0]


def test_a_boolean_zero_optimization_reads_the_old_allgather_size() -> None:
    config = load({"zero_optimization": True, "allgather_size": 2e8, "fp16": {"enabled": True}})
    assert config.zero.allgather_bucket_size == 200_000_000


def test_sequential_all_gather_leaves_a_prefetch_bucket_of_one_element() -> None:
    config = load(zero(3, stage3_allgather_sequential=True, stage3_prefetch_bucket_size=5e7))
    assert config.zero.prefetch_bucket_size == 1
    assert any("stage3_allgather_sequential makes it 1" in note for note in config.notes)


def test_sequential_all_gather_below_stage_3_changes_nothing() -> None:
    config = load(zero(2, stage3_allgather_sequential=True))
    assert config.zero.prefetch_bucket_size == 50_000_000
    assert config.notes == ("ds.json: zero_optimization: stage3_allgather_sequential: no effect at stage 2",)


def test_optimizer_offload_forces_contiguous_gradients_at_stages_1_and_2() -> None:
    offload = {"device": "cpu"}
    for stage in (1, 2):
        config = load(zero(stage, contiguous_gradients=False, offload_optimizer=offload))
        assert config.zero.contiguous_gradients
        assert any("optimizer offload turns it on" in note for note in config.notes)
    assert not load(zero(3, contiguous_gradients=False, offload_optimizer=offload)).zero.contiguous_gradients


def test_offload_blocks_are_resolved() -> None:
    """A ZeRO-Infinity file: parameters and optimizer states on NVMe."""
    config = load(
        {
            **zero(
                3,
                offload_param={"device": "nvme", "nvme_path": "/nvme", "buffer_size": 6e8, "buffer_count": 6},
                offload_optimizer={
                    "device": "nvme",
                    "nvme_path": "/nvme",
                    "pipeline_read": True,
                    "ratio": 0.3,
                },
            ),
            "aio": {"block_size": 262144, "queue_depth": 32, "intra_op_parallelism": 8},
        }
    )
    parameters, optimizer = config.zero.offload_param, config.zero.offload_optimizer
    assert parameters is not None
    assert (parameters.device, parameters.nvme_path) == ("nvme", "/nvme")
    assert (parameters.buffer_count, parameters.buffer_size, parameters.max_in_cpu) == (6, 600_000_000, 10**9)
    assert parameters.pin_memory
    assert optimizer is not None
    assert (optimizer.buffer_count, optimizer.pipeline_read, optimizer.pipeline_write) == (4, True, False)
    assert optimizer.ratio == 0.3
    assert config.optimizer.implementation == "cpu"
    assert (config.aio.block_size_bytes, config.aio.queue_depth, config.aio.intra_op_parallelism) == (
        262144,
        32,
        8,
    )
    with pytest.raises(NotSimulatedError, match=r"zero_optimization\.offload_optimizer: .* a ratio below 1"):
        refuse_unsimulated(config)


def test_deprecated_offload_keys_are_read_as_the_new_ones() -> None:
    config = load(zero(2, cpu_offload=True, cpu_offload_use_pin_memory=True))
    assert config.zero.offload_optimizer is not None
    assert config.zero.offload_optimizer.device == "cpu"
    assert config.notes == (
        "ds.json: zero_optimization.cpu_offload: deprecated, read as 'offload_optimizer'",
        "ds.json: zero_optimization.cpu_offload_use_pin_memory: deprecated and read by nothing; no effect",
    )
    parameters = load(zero(3, cpu_offload_param=True)).zero.offload_param
    assert parameters is not None
    assert parameters.device == "cpu"
    assert load(zero(2, cpu_offload=False)).zero.offload_optimizer is None
    assert load(zero(2, cpu_offload="auto")).zero.offload_optimizer is None


def test_the_old_name_for_gathering_weights_is_read() -> None:
    config = load(zero(3, stage3_gather_fp16_weights_on_model_save=True))
    assert config.zero.gather_16bit_weights_on_model_save


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("cpu_offload", "offload_optimizer", {"device": "cpu"}),
        ("cpu_offload_param", "offload_param", {"device": "cpu"}),
        ("stage3_gather_fp16_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save", True),
        ("stage3_gather_fp16_weights_on_model_save", "gather_16bit_weights_on_model_save", True),
    ],
)
def test_an_old_key_beside_its_new_one_is_refused(old: str, new: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"zero_optimization.{old}: deprecated for '{new}'"):
        load(zero(3, **{old: True, new: value}))


def test_loading_a_mapping_leaves_it_as_it_was() -> None:
    config = zero(3, stage3_prefetch_bucket_size="auto", cpu_offload=False)
    before = repr(config)
    load(config)
    assert repr(config) == before
