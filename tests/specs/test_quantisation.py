"""Whose preparation a quantised model gets, what is refused, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.errors import InputError, NotSimulatedError
from zsim.operations.grouped_linear import GroupedLinear
from zsim.operations.operation import Module, Parameter
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment


def job(
    lora: dict[str, Any] | None = None, strategy: str = "ddp", model: str = "llama-3-8b", **training: Any
) -> Job:
    adapters = {"targets": ["q_proj"], "quantized": "nf4", **(lora or {})}
    table = {"sequence_length": 512, "precision": "bf16", "lora": adapters, **training}
    given = {"kind": strategy, **({"stage": 2} if strategy == "deepspeed" else {})}
    return resolve(Experiment(model=model, cluster="dgx-h100", gpus=1, training=table, strategy=given))


def stored(found: Job) -> str:
    """The type of the embedding, which is in no way quantised."""
    return next(one.stored_dtype for name, one in found.model.named_parameters() if "embed" in name)


@pytest.mark.parametrize(
    ("changes", "is_prepared"),
    [
        ({}, True),
        ({"lora": {"preparation": "none"}}, False),
        ({"cross_entropy": "unsloth"}, False),
        ({"liger": True}, False),
        ({"liger": True, "lora": {"preparation": "peft"}}, True),
        ({"frozen_dtype": "bf16"}, False),
        ({"stored_dtype": "bf16"}, False),
        ({"strategy": "fsdp2"}, False),
        ({"strategy": "deepspeed"}, False),
        ({"model": "mixtral-8x7b"}, False),
        ({"model": "mixtral-8x7b", "transformers": "4.57"}, True),
        ({"lora": {"quantized": None}}, False),
    ],
)
def test_peft_prepares_dense_models_on_one_gpu_and_under_ddp(
    changes: dict[str, Any], is_prepared: bool
) -> None:
    found = job(**changes)
    assert found.training.has_fp32_stream is is_prepared
    assert (stored(found) == "fp32") is is_prepared
    said = [note for note in found.notes if "PEFT's preparation keeps embedding, head and norms" in note]
    assert len(said) == is_prepared


def test_what_is_left_in_16_bits_is_said_too() -> None:
    assert any("which casts it to fp32, is not run" in one for one in job({"preparation": "none"}).notes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"strategy": "fsdp2"}, "found 'peft' with strategy 'fsdp2'"),
        ({"strategy": "deepspeed"}, "found 'peft' with strategy 'deepspeed'"),
        ({"stored_dtype": "bf16"}, "found 'peft' with training.stored_dtype 'bf16'"),
        ({"frozen_dtype": "bf16"}, "beside training.frozen_dtype 'bf16'; leave one out"),
    ],
)
def test_a_preparation_without_effect_is_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        job({"preparation": "peft"}, **changes)


def test_a_preparation_without_4_bits_is_refused() -> None:
    with pytest.raises(InputError, match=r"preparation: found 'none' without training.lora.quantized"):
        job({"quantized": None, "preparation": "none"})


def test_stacked_experts_in_fp32_are_not_simulated() -> None:
    with pytest.raises(NotSimulatedError, match=r"stacked experts, .* expected 'none'"):
        job({"preparation": "peft"}, model="mixtral-8x7b")


def test_eight_bits_wait_for_the_gpu_and_are_never_prepared() -> None:
    found = job({"quantized": "int8"})
    assert not found.training.has_fp32_stream
    assert any("for products in 8 bits the host waits for the GPU" in note for note in found.notes)
    product = next(
        module for module in found.model.blocks[0].modules if module.name.endswith("q_proj.base_layer")
    )
    assert (product.parameters[0].stored_dtype, product.host_waits) == ("int8", True)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"strategy": "fsdp2"},
            "'int8' with strategy 'FSDP2', which neither shards nor casts .* strategy 'ddp'",
        ),
        ({"strategy": "deepspeed"}, "'int8' with strategy 'DeepSpeed'"),
        (
            {"lora": {"quantized": "int8", "preparation": "peft"}},
            "backward would be in fp32; expected 'none'",
        ),
    ],
)
def test_eight_bits_are_refused_where_they_are_cast(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(NotSimulatedError, match=sentence):
        job(**{"lora": {"quantized": "int8"}, **changes})


@pytest.mark.parametrize(
    ("release", "is_old"), [("4.56", True), ("4.57", False), ("4", False), (None, False)]
)
def test_4_bits_come_of_branches_before_bitsandbytes_048(release: str | None, is_old: bool) -> None:
    """Of 4 alone the last release is taken, and no note says that the key changes nothing."""
    found = job(transformers=release)
    assert found.training.branches_on_4_bits is is_old
    assert any("bitsandbytes before 0.48" in note for note in found.notes) is is_old
    assert not any("without effect" in note for note in found.notes)


def test_a_release_without_effect_on_16_bits_is_noted() -> None:
    found = job({"quantized": None}, transformers="4.56")
    assert any("training.transformers is without effect" in note for note in found.notes)
    assert not found.training.branches_on_4_bits


def test_a_release_that_does_not_exist_is_one_sentence() -> None:
    with pytest.raises(InputError, match=r"training.transformers: found 'x', expected a release"):
        job(transformers="x")


def test_stacked_experts_in_4_bits_are_dequantised_once_and_kept_in_16() -> None:
    """Two experts of 64 x 128 are 16,384 elements: 8,192 bytes and 256 scales of 4 become 32,768 bytes, which
    the product keeps, unless adapters' sums are kept in their place. From a tree of branches an element
    takes 105 operations.
    """
    found = job({"quantize_experts": True, "double_quantization": False}, model="mixtral-8x7b")
    stacks = {
        weight.stored_dtype
        for name, weight in found.model.named_parameters()
        if "experts" in name and len(weight.shape) == 3
    }
    assert stacks == {"nf4-single"}
    assert not any("routed experts stay in 16 bits" in note for note in found.notes)
    weight = Parameter("weight", (2, 128, 64), trainable=False, stored_dtype="nf4-single")
    shape, options = BatchShape(1, 256), WorkOptions("bf16")
    module, sums = (
        Module("experts", GroupedLinear(2, 64, 128, is_merged=is_merged), (weight,))
        for is_merged in (False, True)
    )
    dequantisation, product = module.op_spec.forward_kernels(module, shape, options)
    assert (dequantisation.kind, dequantisation.hbm_bytes) == ("elementwise", 8192 + 1024 + 32768)
    branches, _ = module.op_spec.forward_kernels(module, shape, replace(options, branches_on_4_bits=True))
    assert (dequantisation.flops, branches.flops) == (0, 105 * 16_384)
    assert product.kind == "gemm"
    assert module.op_spec.kept_bytes(module, shape, options) == 32768
    assert sums.op_spec.kept_bytes(sums, shape, options) == 0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"lora": {"quantize_experts": True}}, "'llama-3-8b' has no stacked experts"),
        ({"lora": {"quantize_experts": True, "quantized": None}}, "without training.lora.quantized"),
        (
            {"lora": {"quantize_experts": True}, "model": "mixtral-8x7b", "strategy": "fsdp1"},
            "quantize_experts: a weight of routed experts, .* expected strategy 'fsdp2' or 'ddp'",
        ),
    ],
)
def test_experts_in_4_bits_that_nothing_has_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        job(**changes)


def test_experts_in_4_bits_that_are_not_simulated_name_the_strategies_that_are() -> None:
    expected = "this strategy of FSDP2; expected 'ddp' or 'fsdp2' with wrapping 'huggingface'"
    with pytest.raises(NotSimulatedError, match=expected):
        job({"quantize_experts": True}, model="mixtral-8x7b", strategy="fsdp2")
