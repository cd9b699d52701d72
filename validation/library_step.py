"""A step of a Hugging Face model as the libraries run it on one GPU: `python -m validation.library_step`.

transformers' own modules with random weights, under FSDP2 (a group of one rank) or DeepSpeed, with PEFT's
adapters, torch.compile and offload if asked: what their kernels, hooks and allocations cost, without a
network. The model is a preset of zsim; `name@4` has its first four blocks only."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from validation.cut_preset import cut_preset
from validation.oracle.run import fake_world
from validation.provenance import provenance
from validation.timed_step import (
    add_step_options,
    asked_of,
    command_of,
    profile_step,
    release_memory,
    time_steps,
    turn,
    write_trace,
)  # fmt: skip


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="python -m validation.library_step", description=__doc__)
    add = arguments.add_argument
    add("--model", default="llama-3.2-1b@2", help="a preset of zsim or a config.json; @2: two blocks only")
    add("--trainer", choices=("fsdp2", "deepspeed"), default="fsdp2")
    add("--stage", type=int, default=3, help="of DeepSpeed's ZeRO")
    add("--offload", choices=("none", "cpu"), default="none", help="DeepSpeed's optimizer states and masters")
    add("--activation-checkpointing", choices=("none", "full"), default="none")
    add("--attention", choices=("sdpa", "eager"), default="sdpa")
    add("--compile", action="store_true", help="each block by itself, as torchtitan does")
    add("--lora", type=int, default=0, metavar="RANK", help="PEFT's adapters of all linear layers")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add_step_options(arguments, steps=6)
    return arguments


def make_config(name: str) -> Any:
    """transformers' config of a preset, with its first blocks only where asked."""
    from transformers import AutoConfig

    content = cut_preset(name)
    return AutoConfig.for_model(content.pop("model_type"), **content)


def make_model(options: argparse.Namespace, dtype: torch.dtype, device: str) -> nn.Module:
    """The causal language model with its adapters, on the device."""
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            make_config(options.model), dtype=dtype, attn_implementation=options.attention
        )
    model.config.use_cache = False
    if options.activation_checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if options.lora:
            model.enable_input_require_grads()
    model.train()
    assert isinstance(model, nn.Module)
    if not options.lora:
        return model
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=options.lora, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted: nn.Module = get_peft_model(model, config, autocast_adapter_dtype=False)
    return adapted


def fill(model: nn.Module, device: str) -> None:
    """Small random weights instead of the meta device's none; rotary tables as the model makes them."""
    model.to_empty(device=device)
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        with torch.no_grad():
            local.normal_(std=0.02)
    for module in model.modules():
        tables = dict(module.named_buffers(recurse=False))
        for name, buffer in tables.items():
            if buffer.is_floating_point() and "inv_freq" not in name:
                buffer.zero_()
        if "inv_freq" in tables and hasattr(module, "config"):
            made: Any = type(module)(module.config)
            tables["inv_freq"].copy_(made.inv_freq)


Step = Callable[[Tensor], None]


def fsdp2_step(options: argparse.Namespace) -> Step:
    """Every block and the root sharded, parameters in fp32 and bf16 products, or all in bf16 with
    adapters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dtype = torch.bfloat16 if options.lora else torch.float32
    model = make_model(options, dtype, "meta")
    compute = torch.bfloat16 if options.device == "cuda" else torch.float32
    policy = MixedPrecisionPolicy(compute, torch.float32, cast_forward_inputs=False)
    mesh = init_device_mesh(options.device, (1,))
    for block in blocks_of(model):
        if options.compile:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fill(model, options.device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=1e-5, fused=True)

    def step(tokens: Tensor) -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        adamw.step()
        adamw.zero_grad()

    return step


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The decoder's blocks."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(([*blocks] for blocks in lists), key=lambda blocks: sum(map(count_of, blocks)))


def count_of(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def deepspeed_config(options: argparse.Namespace) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": options.stage}
    if options.offload == "cpu":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": options.micro_batch_size,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": options.device == "cuda"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": zero,
    }


def deepspeed_step(options: argparse.Namespace) -> Step:
    """`deepspeed.initialize`, and the three calls of its engine."""
    import deepspeed

    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    model = make_model(options, dtype, options.device)
    engine, *_ = deepspeed.initialize(model=model, config=deepspeed_config(options))

    def step(tokens: Tensor) -> None:
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()

    return step


def run_steps(options: argparse.Namespace) -> tuple[dict[str, Any], torch.profiler.profile | None]:
    """The times, and the profile of one more step where a trace is asked for."""
    step = fsdp2_step(options) if options.trainer == "fsdp2" else deepspeed_step(options)
    shape = (options.micro_batch_size, options.sequence_length)
    tokens = torch.randint(0, make_config(options.model).vocab_size, shape, device=options.device)
    result = time_steps(lambda: step(tokens), options.device, options.steps)
    profiler = profile_step(lambda: step(tokens), options.device) if options.kineto else None
    return result, profiler


def start_alone(device: str) -> None:
    """A real process group of this rank alone, as DeepSpeed wants it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(alone | {"MASTER_PORT": str(port)})
    import deepspeed

    deepspeed.init_distributed("nccl" if device == "cuda" else "gloo")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and peaks of the steps, and the trace that is asked for."""
    torch.manual_seed(0)
    with turn(options.turn):
        if options.trainer == "deepspeed":
            start_alone(options.device)
            result, profiler = run_steps(options)
        else:
            with fake_world(1):
                result, profiler = run_steps(options)
        release_memory(options.device)
    if profiler is not None:
        write_trace(profiler, options.kineto, provenance(command_of("library_step", options)))
    return result


def main(words: list[str]) -> int:
    options = parser().parse_args(words)
    result = measure(options)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    header = provenance(command_of("library_step", options), device=device)
    text = json.dumps({"provenance": header, "asked": asked_of(options), **result}, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
