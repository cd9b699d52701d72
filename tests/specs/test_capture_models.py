"""Captured models of transformers, diffusers and timm: the language models are what the presets are, and any
other is counted as torch counts it, and runs under every kind of data parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install zsim[capture]")
pytest.importorskip("transformers", reason="needs transformers: pip install zsim[transformers]")

import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

import zsim
from zsim.plan.make import stages_of
from zsim.plan.workload.workload import make_workload
from zsim.specs.experiment.resolve import resolve
from zsim.specs.model.huggingface import model_from_config
from zsim.specs.model.spec import ModelSpec, Module

LENGTH = 256
ZERO_3 = {"kind": "deepspeed", "stage": 3}
Made = tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]


def ids(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.long, device="meta")


def floats(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, device="meta")


def llama() -> transformers.PreTrainedConfig:
    return transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=1000, attn_implementation="sdpa",
    )  # fmt: skip


def gpt2() -> transformers.PreTrainedConfig:
    return transformers.GPT2Config(
        n_embd=256, n_layer=3, n_head=8, vocab_size=1000, n_positions=LENGTH, bos_token_id=1,
        eos_token_id=1, attn_implementation="sdpa",
    )  # fmt: skip


def mixtral() -> transformers.PreTrainedConfig:
    return transformers.MixtralConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=1000, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=None, attn_implementation="sdpa", experts_implementation="grouped_mm",
    )  # fmt: skip


def modules_of(model: ModelSpec) -> list[Module]:
    return [*model.before, *(one for block in model.blocks for one in block.modules), *model.after]


def forward_of(model: ModelSpec, length: int) -> float:
    """FLOPs of forward per token."""
    return sum(one.forward_flops(length) for one in modules_of(model))


def saved_bytes(model: Any) -> int:
    """What a micro-batch of two keeps, with transformers' own way of rows to experts."""
    job = resolve(
        zsim.Experiment(
            model=model, cluster="dgx-h100", nodes=1, strategy=ZERO_3,
            training={"sequence_length": LENGTH, "micro_batch_size": 2},
        )
    )  # fmt: skip
    (stage,) = stages_of(job.model, job.parallelism)
    segments = make_workload(stage, job.training).segments
    return sum(call.work.saved_bytes for segment in segments for call in segment.calls)


@pytest.mark.parametrize("config", [llama, gpt2, mixtral])
def test_a_captured_language_model_is_the_preset(config: Callable[[], Any]) -> None:
    """Parameters to the element and FLOPs as `FlopCounterMode` counts; what is kept within 1 %: the rest is
    tables of positions, and indices of the experts' rows."""
    made = config()
    module = transformers.AutoModelForCausalLM.from_config(made).train()
    tokens = torch.arange(2 * LENGTH).reshape(2, LENGTH)
    given = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    captured, preset = zsim.capture(module, **given), model_from_config(made.to_dict(), "preset", "test")
    assert captured.numel == preset.numel == sum(one.numel() for one in module.parameters())
    module.set_attn_implementation("eager")  # the counter knows neither the CPU's fused attention
    module.set_experts_implementation("eager")  # nor grouped products
    with FlopCounterMode(display=False) as counter:
        module(**given)
    counted = counter.get_total_flops()
    assert 2 * LENGTH * forward_of(captured, LENGTH) == counted
    assert 2 * LENGTH * forward_of(preset, LENGTH) == counted
    assert saved_bytes(captured) == pytest.approx(saved_bytes(made.to_dict()), rel=0.01)


def test_a_gate_that_is_half_of_a_product_keeps_all_of_it() -> None:
    """SiLU of one half of S x 2F: what is kept is the whole product, beside SiLU's own output and the product
    of both halves. Of F = 32 and S = 16 in 2 bytes: 2,048 for the product, 1,024 each for the others, 512 for
    the input of width 16, and as much of what the last product's input is: the third."""

    class Gated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.act, self.down = (
                torch.nn.Linear(16, 64, bias=False),
                torch.nn.SiLU(),
                torch.nn.Linear(32, 16, bias=False),
            )

        def forward(self, x: Any) -> Any:
            gate, up = self.up(x).chunk(2, dim=-1)
            return self.down(self.act(gate) * up)

    with torch.device("meta"):
        model = zsim.capture(Gated(), floats(16, 16))
    job = resolve(
        zsim.Experiment(model=model, cluster="dgx-h100", nodes=1, training={"micro_batch_size": 16})
    )
    segments = make_workload(job.model, job.training).segments
    kept = sum(call.work.saved_bytes for segment in segments for call in segment.calls)
    assert kept == 512 + 2_048 + 1_024 + 1_024


# ---- what no config.json describes -------------------------------------------------------------------------


def bert() -> Made:
    module = transformers.BertForMaskedLM(transformers.BertConfig(num_hidden_layers=2))
    return module, (), {"input_ids": ids(2, 128), "labels": ids(2, 128)}


def t5() -> Made:
    config = transformers.T5Config(num_layers=2, decoder_start_token_id=0, pad_token_id=0)
    given = {"input_ids": ids(2, 128), "labels": ids(2, 64)}
    return transformers.T5ForConditionalGeneration(config), (), given


def vit() -> Made:
    module = transformers.ViTForImageClassification(transformers.ViTConfig(num_hidden_layers=2))
    return module, (floats(2, 3, 224, 224),), {"labels": ids(2)}


def whisper() -> Made:
    config = transformers.WhisperConfig(encoder_layers=2, decoder_layers=2)
    return (
        transformers.WhisperForConditionalGeneration(config),
        (floats(1, 80, 3000),),
        {"labels": ids(1, 64)},
    )


def dit() -> Made:
    diffusers = pytest.importorskip("diffusers", reason="needs diffusers: pip install zsim[models]")
    module = diffusers.DiTTransformer2DModel(num_layers=2)
    return module, (floats(2, 4, 32, 32),), {"timestep": ids(2), "class_labels": ids(2)}


def unet() -> Made:
    diffusers = pytest.importorskip("diffusers", reason="needs diffusers: pip install zsim[models]")
    module = diffusers.UNet2DConditionModel(cross_attention_dim=64, block_out_channels=(32, 64, 64, 64))
    return module, (floats(1, 4, 32, 32), floats(1), floats(1, 77, 64)), {}


def resnet() -> Made:
    timm = pytest.importorskip("timm", reason="needs timm: pip install timm", exc_type=ImportError)
    return timm.create_model("resnet26"), (floats(2, 3, 224, 224),), {}


def llava() -> Made:
    """A language model behind a frozen tower."""
    text = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=1000,
    )  # fmt: skip
    vision = transformers.CLIPVisionConfig(num_hidden_layers=2)
    config = transformers.LlavaConfig(
        vision_config=vision.to_dict(), text_config=text.to_dict(), image_token_index=999
    )
    module = transformers.LlavaForConditionalGeneration(config)
    module.model.vision_tower.requires_grad_(False)
    given = {"input_ids": ids(1, 300), "pixel_values": floats(1, 3, 224, 224), "labels": ids(1, 300)}
    return module, (), given


MODELS = [bert, t5, vit, whisper, dit, unet, resnet, llava]
WITHOUT_COUNT = {llava}  # checks of its own read tensors, which torch's counter does not answer
UNPRICED = {whisper: ("index_put",), llava: ("masked_scatter_backward",)}


@pytest.mark.parametrize("make", MODELS)
def test_any_model_is_counted_as_torch_counts_it_and_runs(make: Callable[[], Made]) -> None:
    """Parameters, and the products of forward; operators without a price are named; FSDP2, ZeRO-3 and DDP
    move the trained parameters' gradients."""
    with torch.device("meta"):
        module, args, named = make()
    model = zsim.capture(module.train(), *args, **named)
    assert model.captured is not None
    assert model.numel == sum(one.numel() for one in module.parameters())
    assert model.trainable_numel == sum(one.numel() for one in module.parameters() if one.requires_grad)
    assert model.captured.unpriced == UNPRICED.get(make, ())
    samples, length = model.captured.samples, model.captured.sequence_length
    if make not in WITHOUT_COUNT:
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            module(*args, **named)
        assert samples * length * forward_of(model, length) == pytest.approx(counter.get_total_flops())
    strategies: list[dict[str, Any]] = [{"kind": "fsdp2"}, {"kind": "ddp"}, ZERO_3]
    for strategy in strategies:
        experiment = zsim.Experiment(
            model=model, cluster="dgx-h100", nodes=1, strategy=strategy, training={"micro_batch_size": 2}
        )
        report = zsim.simulate(experiment).report.to_dict()
        assert report["evidence"]["compute"] == "assumed"
        sent = {one["kind"] for one in report["collectives"] if one["bytes"] * one["count"] >= 1_000_000}
        expected = {"fsdp2": "reduce_scatter", "ddp": "all_reduce", "deepspeed": "reduce_scatter"}
        assert expected[strategy["kind"]] in sent
