"""Jobs whose files are started in the programs they are for: every strategy, precision and offload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zsim
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.formats.export import ExportedFiles, export_files

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
}
PRECISIONS = ("bf16", "fp16", "fp32", "fp8")
_OFFLOADS = ("none", "optimizer", "both", "nvme")


def deepspeed_strategy(stage: int, precision: str, offload: str) -> dict[str, Any]:
    """The table of a DeepSpeed config that says all of these."""
    zero: dict[str, Any] = {"stage": stage}
    where = {"device": "nvme", "nvme_path": "/nvme"} if offload == "nvme" else {"device": "cpu"}
    if offload != "none":
        zero["offload_optimizer"] = where
    if offload in ("both", "nvme"):
        zero["offload_param"] = where
    kind = {precision: {"enabled": True}} if precision in ("bf16", "fp16") else {}
    return {"config": {**kind, "train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}}


def strategies() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """{name: (strategy, training)}."""
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for precision in PRECISIONS:
        said = {"precision": precision}
        for stage in (0, 1, 2, 3):
            for offload in _OFFLOADS if precision != "fp8" else ():
                if stage == 3 or offload == "none" or (stage and offload == "optimizer"):
                    strategy = deepspeed_strategy(stage, precision, offload)
                    found[f"deepspeed{stage}-{precision}-{offload}"] = (strategy, {})
        for kind in ("fsdp1", "fsdp2"):
            for is_offloaded in (False, True):
                for reduce in sorted({precision, "fp32"} - {"fp8"}):
                    strategy = {"kind": kind, "reduce_dtype": reduce, "cpu_offload": is_offloaded}
                    name = f"{kind}-{precision}-{reduce}{'-offload' if is_offloaded else ''}"
                    found[name] = (strategy, said)
        found[f"hsdp-{precision}"] = ({"kind": "fsdp2", "replicate": 2, "reduce_dtype": "fp32"}, said)
        found[f"ddp-{precision}"] = ({"kind": "ddp"}, said)
    found["hsdp-reduced-bf16"] = ({"kind": "fsdp2", "replicate": 2, "reduce_dtype": "bf16"}, {})
    found["hybrid-fsdp1"] = (
        {"kind": "fsdp1", "sharding_strategy": "HYBRID_SHARD", "reduce_dtype": "bf16"},
        {},
    )
    found["gathers-fp8"] = ({"kind": "fsdp2", "param_dtype": "fp8"}, {"precision": "fp8"})
    found["everything"] = (
        {"kind": "fsdp2", "reduce_dtype": "bf16", "no_sync": True},
        {
            "activation_checkpointing": "full",
            "compile": True,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
        },
    )
    return found


def job_of(name: str, **where: Any) -> Job:
    """The named case, on two nodes unless `where` says otherwise."""
    strategy, training = strategies()[name]
    return resolve(
        zsim.Experiment(
            model=TINY, cluster="dgx-h100", strategy=strategy,
            training={"sequence_length": 32, **training}, **(where or {"nodes": 2}),
        )
    )  # fmt: skip


def write(job: Job, folder: Path) -> ExportedFiles:
    """The job's files, written."""
    found = export_files(job)
    for name, text in found.files.items():
        (folder / name).write_text(text)
    return found


def cases_with(file: str, **where: Any) -> list[str]:
    """The cases that have such a file."""
    return [name for name in strategies() if file in export_files(job_of(name, **where)).files]
