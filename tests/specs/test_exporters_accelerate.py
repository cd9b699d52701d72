"""Accelerate's own config class and FSDP plugin take the YAML that zsim writes. Needs accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import zsim
from tests.specs.written_files import cases_with, job_of, write
from zsim.specs.experiment.resolve import resolve
from zsim.specs.formats.export import export_files

pytest.importorskip("accelerate", reason="needs accelerate: pip install zsim[interop]")


def written(folder: Path, strategy: dict[str, Any], **training: Any) -> str:
    job = resolve(
        zsim.Experiment(
            model="llama-3-8b", cluster="dgx-h100", nodes=2, strategy=strategy,
            training={"precision": "bf16", **training},
        )
    )  # fmt: skip
    path = folder / "accelerate.yaml"
    path.write_text(export_files(job).files["accelerate.yaml"])
    return str(path)


@pytest.mark.parametrize(
    "strategy",
    [
        {"kind": "fsdp2", "reduce_dtype": "bf16", "replicate": 2},
        {"kind": "fsdp1", "reduce_dtype": "bf16", "sharding_strategy": "SHARD_GRAD_OP"},
        {"kind": "deepspeed", "stage": 3},
        {"kind": "ddp"},
        {"kind": "ddp", "bucket_cap_mb": 50.0, "gradient_as_bucket_view": True},
        {"kind": "fsdp1", "reduce_dtype": "bf16", "wrapping": "size:100000000", "cpu_offload": True},
    ],
    ids=lambda strategy: "-".join([strategy["kind"], *list(strategy)[1:]]),
)
def test_the_config_class_knows_every_key(tmp_path: Path, strategy: dict[str, Any]) -> None:
    from accelerate.commands.config.config_args import ClusterConfig

    config = ClusterConfig.from_yaml_file(written(tmp_path, strategy, activation_checkpointing="full"))
    assert (config.num_machines, config.num_processes) == (2, 16)
    assert config.mixed_precision == (None if strategy["kind"] == "deepspeed" else "bf16")


@pytest.mark.parametrize("name", cases_with("accelerate.yaml"))
def test_accelerate_launch_takes_every_yaml(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `accelerate launch` checks before it starts the ranks, and what the plugins check in them."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    if name.startswith("deepspeed"):
        pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install zsim[interop]")
    job = job_of(name)
    write(job, tmp_path)
    monkeypatch.chdir(tmp_path)
    said = ["--config_file", "accelerate.yaml", "--main_process_ip", "10.0.0.1", "--machine_rank", "1"]
    asked = launch_command_parser().parse_args([*said, "train.py"])
    args, defaults, has_precision = _validate_launch_command(asked)
    if args.use_deepspeed:
        fields = [*defaults.deepspeed_config, *(["mixed_precision"] if has_precision else [])]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        command, env = prepare_deepspeed_cmd_env(args)
        assert command is None  # torch's launcher on each node, not pdsh
    else:
        env = prepare_multi_gpu_env(args)
    assert (args.nnodes, args.node_rank, args.nproc_per_node) == ("2", 1, "8")
    assert args.rdzv_endpoint == "10.0.0.1:29500"
    env |= {"FSDP_SYNC_MODULE_STATES": "false", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}  # those need a GPU
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    if args.use_deepspeed:
        plugin = DeepSpeedPlugin()
        plugin.set_mixed_precision(env["ACCELERATE_MIXED_PRECISION"])
        for kind in ("bf16", "fp16"):
            assert plugin.deepspeed_config[kind]["enabled"] == (job.training.precision == kind)
    elif args.use_fsdp:
        sharded = FullyShardedDataParallelPlugin()
        assert job.kind == f"fsdp{sharded.fsdp_version}"
        if env["ACCELERATE_MIXED_PRECISION"] != "no":
            sharded.set_mixed_precision(env["ACCELERATE_MIXED_PRECISION"])
        replicate = getattr(job.strategy, "replicate", 1)
        if job.kind == "fsdp2" and replicate > 1:
            sizes = ParallelismConfig()
            assert (sizes.dp_replicate_size, sizes.dp_shard_size) == (replicate, 16 // replicate)


@pytest.mark.parametrize("version", [1, 2])
def test_the_fsdp_plugin_reads_the_same_values(
    tmp_path: Path, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `accelerate launch` hands keys on: in upper case, in the environment."""
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.utils import FullyShardedDataParallelPlugin

    strategy: dict[str, Any] = {"kind": f"fsdp{version}", "reduce_dtype": "bf16"}
    if version == 1:
        strategy |= {"sharding_strategy": "SHARD_GRAD_OP", "backward_prefetch": "BACKWARD_POST"}
        strategy |= {"forward_prefetch": True, "cpu_offload": True}
    else:
        strategy["reshard_after_forward"] = False
    config = ClusterConfig.from_yaml_file(written(tmp_path, strategy, activation_checkpointing="full"))
    for key, value in config.fsdp_config.items():
        name = key.removeprefix("fsdp_").upper().replace("LAYER_", "")
        monkeypatch.setenv(f"FSDP_{name}", str(value))
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == version
    assert plugin.activation_checkpointing
    if version == 2:
        assert plugin.reshard_after_forward is False
    else:
        assert plugin.sharding_strategy.name == "SHARD_GRAD_OP"
        assert plugin.backward_prefetch.name == "BACKWARD_POST"
        assert plugin.forward_prefetch
        assert plugin.cpu_offload.offload_params
        assert plugin.limit_all_gathers


def test_what_the_notes_give_to_the_script_is_what_accelerate_takes() -> None:
    """The handler that the note spells out makes DDP's own arguments."""
    from accelerate.utils import DistributedDataParallelKwargs

    job = resolve(
        zsim.Experiment(
            model="llama-3-8b", cluster="dgx-h100",
            strategy={"kind": "ddp", "bucket_cap_mb": 50.0, "gradient_as_bucket_view": True},
        )
    )  # fmt: skip
    note = next(note for note in export_files(job).notes if "kwargs_handlers" in note)
    call = note.partition("kwargs_handlers=[")[2].partition("]")[0]
    handler = eval(call, {"DistributedDataParallelKwargs": DistributedDataParallelKwargs})
    assert handler.to_kwargs() == {"bucket_cap_mb": 50, "gradient_as_bucket_view": True}
