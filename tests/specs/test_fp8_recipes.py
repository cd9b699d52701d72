"""Recipes of fp8 training: defaults, and refusals with the nearest that the GPU or the framework has."""

from __future__ import annotations

from typing import Any

import pytest

from zsim.errors import InputError, NotSimulatedError
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.strategy.fp8 import Fp8

MEGATRON = {"kind": "megatron", "distributed_optimizer": True}


def fp8(cluster: str = "dgx-h100", **changes: Any) -> Fp8:
    found: Fp8 = resolved(cluster, **changes).training.fp8
    return found


def resolved(
    cluster: str = "dgx-h100", strategy: Any = None, parallelism: Any = None, **training: Any
) -> Any:
    return resolve(
        Experiment(
            model="llama-2-7b",
            cluster=cluster,
            nodes=1,
            training={"sequence_length": 4096, **training},
            strategy=strategy or MEGATRON,
            parallelism=parallelism or {},
        )
    )


def test_only_fp8_means_the_frameworks_default() -> None:
    """--fp8-recipe is delayed on every GPU; torchtitan's float8 is tensorwise."""
    assert fp8(precision="fp8").recipe == "delayed"
    assert fp8("hgx-b200", precision="fp8").recipe == "delayed"
    assert fp8(strategy={"kind": "fsdp2"}, precision="fp8").recipe == "torchao-tensorwise"


def test_a_recipe_says_that_the_precision_is_fp8() -> None:
    assert resolved(fp8_recipe="current").training.precision == "fp8"
    with pytest.raises(
        InputError, match=r"training.fp8_recipe: found 'current' with training.precision 'bf16'"
    ):
        resolved(fp8_recipe="current", precision="bf16")


def test_hopper_transposes_and_blackwell_does_not() -> None:
    assert fp8(fp8_recipe="delayed").transposes
    assert not fp8("hgx-b200", fp8_recipe="delayed").transposes


def test_megatron_keeps_cast_weights_and_fsdp2_casts_again() -> None:
    kept, again = fp8(fp8_recipe="current"), fp8(strategy={"kind": "fsdp2"}, fp8_recipe="current")
    assert (kept.keeps_weights, kept.recasts_weights) == (True, False)
    assert (again.keeps_weights, again.recasts_weights) == (False, True)


@pytest.mark.parametrize(
    ("cluster", "recipe", "nearest"),
    [
        ("dgx-h100", "mxfp8", "from 10 on.*nearest that it has is 'block'"),
        ("dgx-h100", "nvfp4", "nearest that it has is 'block'"),
        ("rtx-4090-x8", "block", "from 9 on.*nearest that it has is 'current'"),
        ("mi300x-x8", "mxfp8", "needs an NVIDIA GPU.*nearest that it has is 'current'"),
    ],
)
def test_a_recipe_that_the_gpu_lacks_is_refused_with_the_nearest(
    cluster: str, recipe: str, nearest: str
) -> None:
    with pytest.raises(InputError, match=nearest):
        fp8(cluster, strategy={"kind": "fsdp2"}, fp8_recipe=recipe)


def test_a_gpu_without_fp8_refuses_every_recipe() -> None:
    with pytest.raises(InputError, match=r"'a100-sxm-80gb' has no fp8 arithmetic"):
        fp8("dgx-a100-80gb", fp8_recipe="block")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fp8_recipe": "torchao-rowwise"}, "layers are Transformer Engine's; the nearest.*'block'"),
        ({"fp8_recipe": "delayed", "bf16_first_layers": 1}, "Megatron refuses them with delayed.*'current'"),
        ({"bf16_last_layers": 1}, "training.bf16_last_layers: found 1 with training.precision none"),
        ({"fp8_recipe": "current", "bf16_first_layers": 20, "bf16_last_layers": 13}, "of 32 layers"),
        (
            {"precision": "fp8", "strategy": {"kind": "megatron", "fp8_param_gather": True}},
            "fp8_param_gather: found true without distributed_optimizer",
        ),
        ({"precision": "bf16", "strategy": {**MEGATRON, "fp8_param_gather": True}}, "nothing is cast"),
        (
            {"fp8_recipe": "torchao-rowwise", "strategy": {"kind": "fsdp2", "param_dtype": "fp8"}},
            "with one scale per tensor only; expected param_dtype 'bf16'",
        ),
        (
            {"precision": "fp8", "strategy": {"kind": "fsdp2", "precompute_fp8_scales": True}},
            "gathered in bf16; expected param_dtype 'fp8'",
        ),
        ({"precision": "bf16", "strategy": {"kind": "fsdp2", "param_dtype": "fp8"}}, "expected 'bf16', or"),
        ({"fp8_recipe": "mxfp8x"}, "did you mean 'mxfp8'"),
    ],
)
def test_what_a_framework_lacks_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolved(**changes)


def test_weights_kept_in_fp4_are_not_simulated() -> None:
    with pytest.raises(NotSimulatedError, match="kept in fp4"):
        resolved("hgx-b200", {**MEGATRON, "fp8_param_gather": True}, fp8_recipe="nvfp4")


def test_features_of_a_tensor_parallel_rank_must_be_whole_blocks() -> None:
    """11,008 features over 8 ranks are 1,376 = 43 x 32; over 16 they are 688, no multiple of 32."""
    resolved("hgx-b200", None, {"tensor": 8, "sequence_parallel": True}, fp8_recipe="mxfp8")
    with pytest.raises(InputError, match=r"'mxfp8' casts multiples of 32.*has 688 on each of 16.*'current'"):
        resolve(
            Experiment(
                model="llama-2-7b", cluster="hgx-b200", nodes=2, strategy=MEGATRON,
                training={"sequence_length": 4096, "fp8_recipe": "mxfp8"}, parallelism={"tensor": 16},
            )
        )  # fmt: skip


def test_gathered_parts_must_be_whole_blocks_of_tokens() -> None:
    """8 ranks of 128 tokens each."""
    with pytest.raises(InputError, match=r"that 1024 divides \(128 on each of 8 ranks\).*is 4,096$"):
        resolved(
            "dgx-h100",
            None,
            {"tensor": 8, "sequence_parallel": True},
            fp8_recipe="block",
            sequence_length=4160,
        )
