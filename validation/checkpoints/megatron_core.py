"""What the ranks of Megatron-Core write of a model with experts, on CPU ranks.

    python -m validation.checkpoints.megatron_core FOLDER --out traces/checkpoints

FOLDER holds Megatron-Core as pip installs it (`pip install --target FOLDER --no-deps megatron-core==0.16.1`).
A GPT of two layers, its DDP and its optimizer are Megatron's, over gloo; what they ask of CUDA is answered by
the CPU. They are saved with the fully parallel strategy as `--use-dist-ckpt` does by default; `megatron.json`
has by rank the bytes of tensors and the number of shards, read from `.metadata`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.overrides import TorchFunctionMode

from validation.launch import run
from validation.megatron_host import Nothing, load_from
from validation.provenance import provenance, write_checksums

VERSION = "0.16.1"
# (ranks, tensor, expert, expert_tensor, experts), where the optimizer is distributed.
CASES = (
    (2, 1, 1, 1, 0), (4, 2, 1, 1, 0), (2, 1, 2, 1, 4), (4, 1, 2, 1, 4), (4, 1, 4, 1, 4), (4, 2, 1, 1, 4),
    (4, 2, 2, 1, 4), (4, 2, 2, 2, 4),
)  # fmt: skip
SHAPE = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "vocabulary": 512, "dense": 128, "expert": 64}
Case = tuple[int, int, int, int, int]


class _NoRandomness(Nothing):
    """The states of random numbers."""

    def fork(self, *_: Any) -> Any:
        return contextlib.nullcontext()

    def get_states(self) -> dict[str, Any]:
        return {}


class _OnCpu(TorchFunctionMode):
    """The CPU in place of a GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keys = dict(kwargs or {})
        if str(keys.get("device", "")).startswith("cuda"):
            keys["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not keys:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **keys)


def save(rank: int, world_size: int, case: Case, folder: str, out: str) -> list[dict[str, int]]:
    """Save on this rank; what every rank wrote."""
    load_from(Path(folder))
    with no_gpu():
        _save(case, Path(out))
    return written(Path(out), world_size)


def _core(name: str) -> Any:
    return importlib.import_module(f"megatron.core.{name}")


def _save(case: Case, out: Path) -> None:
    _, tensor, expert, expert_tensor, _ = case
    state = _core("parallel_state")
    state.initialize_model_parallel(
        tensor_model_parallel_size=tensor, expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
    )  # fmt: skip
    model = megatron_model(case)
    settings = _core("optimizer").OptimizerConfig(
        optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True
    )
    optimizer = _core("optimizer").get_megatron_optimizer(settings, [model])
    for parameter in model.parameters():
        parameter.main_grad.zero_()
    optimizer.step()
    states = {"model": model.module.sharded_state_dict()}
    kind = {"distrib_optim_sharding_type": "dp_reshardable"}  # training/checkpointing.py
    states["optimizer"] = optimizer.sharded_state_dict(states["model"], metadata=kind)
    saving = "dist_checkpointing"
    strategy = _core(f"{saving}.strategies.fully_parallel").FullyParallelSaveStrategyWrapper(
        _core(f"{saving}.serialization").get_default_save_sharded_strategy("torch_dist"),
        state.get_data_parallel_group(with_context_parallel=True), True,
    )  # fmt: skip
    out.mkdir(exist_ok=True)
    dist.barrier()
    _core(saving).save(states, str(out), strategy)
    dist.barrier()
    for helper in multiprocessing.active_children():  # Megatron's own, which outlive a rank
        helper.terminate()


def no_gpu() -> TorchFunctionMode:
    """A context in which Megatron's modules are made and run on the CPU."""
    for place in ("tensor_parallel.random", "tensor_parallel", "tensor_parallel.layers"):
        _core(place).get_cuda_rng_tracker = lambda *args, **kwargs: _NoRandomness()
    norms = _core("transformer.torch_norm").WrappedTorchNorm
    norms.__new__ = lambda cls, config, hidden_size, eps=1e-5, **keys: nn.RMSNorm(hidden_size, eps=eps)
    return _OnCpu()


def megatron_model(case: Case, *, is_distributed: bool = True) -> Any:
    """Megatron's GPT in its DDP; `is_distributed`: as the distributed optimizer needs it, else with weights
    initialised, which marks the dimension that tensor-parallel ranks share."""
    _, tensor, expert, expert_tensor, experts = case
    routed = {
        "num_moe_experts": experts, "moe_router_topk": 2, "moe_ffn_hidden_size": SHAPE["expert"],
        "moe_token_dispatcher_type": "alltoall", "sequence_parallel": tensor > 1,
    }  # fmt: skip
    config = _core("transformer.transformer_config").TransformerConfig(
        num_layers=SHAPE["layers"], hidden_size=SHAPE["hidden"], num_attention_heads=SHAPE["heads"],
        num_query_groups=SHAPE["kv_heads"], ffn_hidden_size=SHAPE["dense"], add_bias_linear=False,
        gated_linear_unit=True, activation_func=nn.functional.silu, bf16=True, params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16, use_cpu_initialization=True, normalization="RMSNorm",
        gradient_accumulation_fusion=False, masked_softmax_fusion=False,
        perform_initialization=not is_distributed,
        tensor_model_parallel_size=tensor, expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor, **(routed if experts else {}),
    )  # fmt: skip
    spec = _core("models.gpt.gpt_layer_specs").get_gpt_layer_local_spec(
        num_experts=experts or None, moe_grouped_gemm=False, normalization="RMSNorm"
    )
    model = _core("models.gpt").GPTModel(
        config, spec, vocab_size=SHAPE["vocabulary"], max_sequence_length=64,
        share_embeddings_and_output_weights=False, position_embedding_type="rope",
    ).bfloat16()  # fmt: skip
    parallel = _core("distributed")
    how = parallel.DistributedDataParallelConfig(
        use_distributed_optimizer=is_distributed, grad_reduce_in_fp32=True
    )
    return parallel.DistributedDataParallel(config, how, model)


def written(folder: Path, world_size: int) -> list[dict[str, int]]:
    """By rank the bytes of tensors and the number of shards, of parameters and of states."""
    metadata = FileSystemReader(folder).read_metadata()
    sizes = {
        (name, tuple(chunk.offsets)): chunk.sizes.numel() * tensor.properties.dtype.itemsize
        for name, tensor in metadata.state_dict_metadata.items() if isinstance(tensor, TensorStorageMetadata)
        for chunk in tensor.chunks
    }  # fmt: skip
    found = [{"parameters": 0, "optimizer_states": 0, "shards": 0} for _ in range(world_size)]
    assert metadata.storage_data is not None
    for index, place in metadata.storage_data.items():
        size = sizes.get((index.fqn, tuple(index.offset or ())))
        if size is not None:  # else a pickle
            mine = found[int(place.relative_path.split("_")[2])]
            mine["optimizer_states" if ".bucket_idx_" in index.fqn else "parameters"] += size
            mine["shards"] += 1
    return found


def main(words: list[str]) -> int:
    arguments = argparse.ArgumentParser(
        prog="python -m validation.checkpoints.megatron_core", description=__doc__
    )
    arguments.add_argument("folder", metavar="FOLDER", help="holds Megatron-Core")
    arguments.add_argument("--out", type=Path, metavar="DIR", help="write megatron.json here")
    options = arguments.parse_args(words)
    saves = []
    for case in CASES:
        with tempfile.TemporaryDirectory(prefix="zsim-megatron-") as root:
            places = (case, options.folder, str(Path(root) / "saved"))
            ranks = run("validation.checkpoints.megatron_core:save", case[0], places, timeout=600)[0]
        names = ("ranks", "tensor", "expert", "expert_tensor", "experts")
        saves.append({**dict(zip(names, case, strict=True)), "written": ranks})
        print(saves[-1], flush=True)
    if options.out:
        command = "python -m validation.checkpoints.megatron_core FOLDER"
        about = provenance(command, backend="gloo", seed=0)
        about["versions"]["megatron-core"] = VERSION
        content = {"format": 1, "provenance": about, "shape": SHAPE, "saves": saves}
        (options.out / "megatron.json").write_text(json.dumps(content, indent=1) + "\n")
        if options.out.parent.name == "traces":
            write_checksums(options.out.parent)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
