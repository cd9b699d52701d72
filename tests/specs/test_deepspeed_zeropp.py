"""What a DeepSpeed JSON may say about ZeRO++ and MiCS, and what DeepSpeed itself gets wrong with it."""

from __future__ import annotations

from typing import Any

import pytest

from zsim.errors import InputError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.settings.load import load_deepspeed_config


def load(precision: str = "fp16", version: str = "0.19.8", /, **zero: Any) -> DeepSpeedConfig:
    config = {
        precision: {"enabled": True},
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, **zero},
    }
    return load_deepspeed_config(
        config, name="ds.json", world_size=16, gpus_per_node=8, hidden_size=4096, version=version
    )


@pytest.mark.parametrize(
    ("arguments", "zero", "note"),
    [
        (("fp16", "0.13.1"), {"zero_hpz_partition_size": 8}, "never refreshes the secondary shards"),
        (("bf16", "0.19.5"), {"zero_quantized_weights": True}, "quantises the bits of bf16 weights as if"),
        (("bf16",), {"zero_quantized_gradients": True}, "read bf16 gradients as if they were fp16"),
        (("fp16", "0.19.6"), {"mics_shard_size": 8}, "scatters gradients over all GPUs by mistake"),
        (("fp16",), {"zero_quantized_nontrainable_weights": True}, "no effect: every parameter is trained"),
        (("fp16", "0.19.7"), {"zeropp_loco_param": {}}, "no effect without zero_quantized_gradients"),
        (("fp16", "0.19.6"), {"mics_hierarchical_params_gather": True}, "no effect without mics_shard_size"),
    ],
)
def test_what_is_wrong_or_does_nothing_is_a_note(
    arguments: tuple[str, ...], zero: dict[str, Any], note: str
) -> None:
    assert [each for each in load(*arguments, **zero).notes if note in each]


@pytest.mark.parametrize(
    ("arguments", "zero"),
    [
        (("fp16", "0.13.2"), {"zero_hpz_partition_size": 8}),
        (("bf16", "0.19.6"), {"zero_quantized_weights": True}),
        (("fp16", "0.19.5"), {"zero_quantized_weights": True, "zero_quantized_gradients": True}),
        (("fp16", "0.19.2"), {"mics_shard_size": 8}),
        (("fp16", "0.19.7"), {"zeropp_loco_param": {}, "zero_quantized_gradients": True}),
    ],
)
def test_what_is_right_needs_no_note(arguments: tuple[str, ...], zero: dict[str, Any]) -> None:
    assert load(*arguments, **zero).notes == ()


def test_mics_takes_the_prefetch_bucket_as_it_is() -> None:
    """One all-gather per parameter makes ZeRO-3's bucket 1; MiCS never gets to know."""
    zero = {"stage3_allgather_sequential": True}
    assert load("fp16", "0.19.2", **zero).zero.prefetch_bucket_size == 1
    ours = load("fp16", "0.19.2", mics_shard_size=8, **zero).zero
    assert (ours.prefetch_bucket_size, ours.allgather_sequential) == (50_000_000, False)


def test_secondary_shards_on_nvme_are_refused() -> None:
    with pytest.raises(InputError, match=r"cannot be on NVMe; .*'none' or 'cpu', found 'nvme'"):
        load(zero_hpz_partition_size=8, offload_param={"device": "nvme", "nvme_path": "/nvme"})


def test_hierarchical_groups_must_split_over_their_nodes() -> None:
    """20 of 40 GPUs hold two whole nodes of 8 and split in two; 36 of 72 hold four; 28 of 56 hold three."""
    for size, world, is_allowed in ((20, 40, True), (36, 72, True), (28, 56, False)):
        zero = {"stage": 3, "mics_shard_size": size, "mics_hierarchical_params_gather": True}
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
        arguments: dict[str, Any] = {"world_size": world, "gpus_per_node": 8, "hidden_size": 64}
        if is_allowed:
            load_deepspeed_config(config, version="0.19.2", **arguments)
            continue
        with pytest.raises(InputError, match="spans 3 nodes; expected a multiple of 3"):
            load_deepspeed_config(config, version="0.19.2", **arguments)


def test_the_label_names_what_is_on() -> None:
    quantised = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    assert load().label(16, 16) == "ZeRO-3"
    assert load(zero_hpz_partition_size=64, **quantised).label(16, 16) == "ZeRO-3 + hpZ 16 + qwZ + qgZ"
    assert load("fp16", "0.19.2", mics_shard_size=8).label(16, 16) == "MiCS 2 x 8"
