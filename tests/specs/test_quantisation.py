"""Whose preparation a quantised model gets, what is refused, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest

from zsim.errors import InputError, NotSimulatedError
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
