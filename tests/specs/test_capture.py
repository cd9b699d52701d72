"""A captured torch module is the model that the preset is, and bad input gets one paragraph."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install zsim[capture]")

import torch

import zsim
from validation.llama import Llama, LlamaShape
from zsim.errors import InputError, NotSimulatedError
from zsim.plan.workload.workload import make_workload
from zsim.specs.capture.capture import capture_function
from zsim.specs.experiment.resolve import resolve
from zsim.specs.model.huggingface import model_from_config
from zsim.specs.model.spec import ModelSpec

SHAPE = LlamaShape(256, 512, 3, 8, 2, 1000)
CONFIG = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 4096,
}  # fmt: skip


def captured_llama(samples: int = 2, length: int = 128) -> ModelSpec:
    with torch.device("meta"):
        tokens = torch.zeros(samples, length, dtype=torch.long)
        return zsim.capture(Llama(SHAPE), tokens, tokens)


def experiment(model: Any, **changes: Any) -> Any:
    training = {"sequence_length": 128, "micro_batch_size": 4, **changes.pop("training", {})}
    return zsim.Experiment(model=model, cluster="dgx-h100", nodes=1, training=training, **changes)


def saved_bytes(model: Any) -> int:
    job = resolve(experiment(model))
    segments = make_workload(job.model, job.training).segments
    return sum(call.work.saved_bytes for segment in segments for call in segment.calls)


def test_a_captured_llama_has_the_presets_parameters_and_products() -> None:
    """Names, order and shapes of every parameter; FLOPs of every product; the three blocks are one object."""
    captured, preset = captured_llama(), model_from_config(CONFIG, "llama", "test")
    assert list(captured.named_parameters()) == list(preset.named_parameters())
    assert len({id(block) for block in captured.blocks}) == 1
    assert len(captured.blocks) == 3
    flops = [
        sum(module.forward_flops(128) for block in model.blocks for module in block.modules)
        for model in (captured, preset)
    ]
    assert flops[0] == flops[1]


def test_a_captured_llama_multiplies_what_torch_counts() -> None:
    """`FlopCounterMode` of forward, with attention written out: 2 mnk of every product, all pairs."""
    from torch.utils.flop_counter import FlopCounterMode

    model = captured_llama(samples=1)
    modules = [*model.before, *(one for block in model.blocks for one in block.modules), *model.after]
    with torch.device("meta"):
        tokens = torch.zeros(1, 128, dtype=torch.long)
        module = Llama(SHAPE)
    with FlopCounterMode(display=False) as counter:
        module(tokens, tokens)
    assert counter.get_total_flops() == 128 * sum(one.forward_flops(128) for one in modules)


@pytest.mark.parametrize("samples", [1, 2])
def test_it_keeps_what_the_preset_keeps(samples: int) -> None:
    """Within 1 %, for a micro-batch of four whatever the example had; the rest is tables of positions."""
    expected = saved_bytes(CONFIG)
    assert saved_bytes(captured_llama(samples)) == pytest.approx(expected, rel=0.01)


STRATEGIES = [
    *({"kind": kind} for kind in ("ddp", "fsdp1", "fsdp2")),
    *({"kind": "deepspeed", "stage": stage} for stage in (1, 2, 3)),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_it_is_sharded_as_the_preset(strategy: dict[str, Any]) -> None:
    """The same collectives, by kind, group and bytes."""
    found = []
    for model in (captured_llama(), CONFIG):
        report = zsim.simulate(experiment(model, strategy=strategy)).report.to_dict()
        found.append(
            [(one["kind"], one["group"], one["count"], one["bytes"]) for one in report["collectives"]]
        )
    assert found[0] == found[1]
    assert found[0]


class Convolutions(torch.nn.Module):
    """Two blocks around a frozen first convolution, and a parameter of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(8, 1, 1))
        self.stem = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.stem.requires_grad_(False)
        self.stage = torch.nn.Sequential(*(Bottleneck() for _ in range(2)))
        self.head = torch.nn.Linear(8, 10)

    def forward(self, images: Any) -> Any:
        x = self.stage(self.stem(images) * self.scale)
        return self.head(x.mean((2, 3)))


class Bottleneck(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(8, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)

    def forward(self, x: Any) -> Any:
        return x + torch.relu(self.norm(self.conv(x)))


def test_convolutions_count_their_products_and_frozen_ones_only_forward() -> None:
    """Of one 16 x 16 image: the stem 2 * 256 * 8 * 27 forward alone; each block 2 * 256 * 8 * 72 three times;
    the head 2 * 8 * 10 three times. A sample is one position."""
    with torch.device("meta"):
        model = zsim.capture(Convolutions(), torch.zeros(2, 3, 16, 16))
    report = zsim.simulate(
        zsim.Experiment(model=model, cluster="dgx-h100", nodes=1, training={"micro_batch_size": 6})
    ).report.to_dict()
    expected = 6 * (110_592 + 2 * 3 * 294_912 + 3 * 160)
    rate = report["model_flops_per_second_per_gpu"] * report["step_seconds"]
    assert rate == pytest.approx(expected)
    assert report["flops_convention"].startswith("2mnk of every product")
    assert report["evidence"]["compute"] == "assumed"
    names = [name for name, _ in model.named_parameters()]
    assert names == [name for name, _ in Convolutions().named_parameters()]
    assert [name for name, one in model.named_parameters() if not one.trainable] == [
        "stem.weight",
        "stem.bias",
    ]
    assert list(model.block_names or ()) == ["stage.0", "stage.1"]


def test_the_users_module_stays_as_it_is() -> None:
    module = Convolutions()
    zsim.capture(module, torch.zeros(1, 3, 16, 16))
    assert {one.device.type for one in module.parameters()} == {"cpu"}
    assert not module.stem._forward_hooks
    assert all(one.grad is None for one in module.parameters())


class ByValue(torch.nn.Linear):
    def forward(self, x: Any) -> Any:
        return super().forward(x) if x.sum() > 0 else x


def test_code_that_depends_on_values_is_refused() -> None:
    with pytest.raises(InputError, match="depends on the values of tensors"):
        zsim.capture(ByValue(4, 4), torch.zeros(2, 4))


@pytest.mark.parametrize(
    ("module", "inputs", "said"),
    [(torch.nn.ReLU(), (torch.zeros(2, 4),), "no parameters"), (torch.nn.Linear(4, 4), (), "no tensor"),
     (torch.nn.Linear(4, 4), (torch.zeros(2, 5),), "run on these inputs"),
     (torch.nn.Linear(4, 4).requires_grad_(False), (torch.zeros(2, 4),), "trainable"), (3, (), "nn.Module")],
)  # fmt: skip
def test_what_cannot_be_captured_is_said(module: Any, inputs: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        zsim.capture(module, *inputs)


def test_a_function_is_looked_for_in_the_working_directory(tmp_path: Any, monkeypatch: Any) -> None:
    """And what it returns, or is not, is said."""
    (tmp_path / "captured_here.py").write_text(
        "import torch\ndef made():\n    return torch.nn.Linear(8, 8), torch.zeros(2, 8)\n"
        "def wrong():\n    return 3\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    assert capture_function("captured_here:made").numel == 72
    with pytest.raises(InputError, match=r"returned a int; expected \(module, inputs\)"):
        capture_function("captured_here:wrong")
    with pytest.raises(InputError, match="did you mean 'made'"):
        capture_function("captured_here:mode")
    with pytest.raises(InputError, match="cannot import 'not_here_at_all'"):
        capture_function("not_here_at_all:made")


def test_what_a_capture_fixes_is_refused() -> None:
    model = captured_llama()
    with pytest.raises(InputError, match="captured with samples of 128 positions"):
        resolve(experiment(model, training={"sequence_length": 64}))
    with pytest.raises(NotSimulatedError, match="data parallelism only"):
        resolve(experiment(model, parallelism={"tensor": 2}))
