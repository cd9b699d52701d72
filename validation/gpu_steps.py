"""What zsim predicts of the steps that were measured on one GPU: `python -m validation.gpu_steps`.

Writes `validation/gpu_steps.md` from `traces/h100-80gb-hbm3/`: seconds, and the most that torch's allocator
reserved, measured and predicted."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import zsim
from validation.cut_preset import cut_preset

FOLDER = Path(__file__).parents[1] / "traces" / "h100-80gb-hbm3"
PAGE = Path(__file__).with_suffix(".md")
# `dgx-h100` with the host of the machine that was measured: [eager_call] of presets/frameworks.toml has its
# factor, the microbenchmarks a launch and what AdamW on 16 threads moves.
CLUSTER: dict[str, Any] = {
    "extends": "dgx-h100",
    "host": {
        "source": "traces/h100-80gb-hbm3", "evidence": "measured", "cores": 16, "memory": "128 GB",
        "memory_bandwidth": "228 GB/s", "seconds_per_launch": "7.2 us", "overhead_factor": 2.1,
    },
}  # fmt: skip
OWN_PRODUCTS = "h100-sxm-80gb-cuda13"  # products as that GPU's microbenchmarks have them
FITTED = {  # runs by which host costs were set, with those: presets/frameworks.toml
    "hf_llama-3.2-1b_t64_b1": ("eager_call", "eager_node", "fsdp2_unshard", "fsdp2_reduce"),
    "hf_llama-3.2-1b_trainer-deepspeed_t64_b1": ("deepspeed_fetch", "deepspeed_release"),
}
HEAD = """# Steps measured on one H100, and predicted

One H100 SXM of 80 GB and 700 W, torch 2.11 with CUDA 13.0, in a virtual machine of 16 cores of a Xeon
(`traces/h100-80gb-hbm3`; `python -m validation.gpu` measures, `python -m validation.gpu_steps` writes this
page). Predicted with the preset `dgx-h100` and this machine's host: 2.1 times as slow as the reference, 16
cores. Own products: with `gpu = "h100-sxm-80gb-cuda13"`, products as the microbenchmarks have them on this
GPU. `hf`: transformers' modules, `llama`: this repository's Llama; under FSDP2 unless named otherwise.
`model@8`: its first 8 blocks. `t`: tokens of a sequence, `b`: sequences; `ac-full`: every block recomputed.
Of a world of 64 or 256 ranks this is rank 0 on a process group whose collectives copy its own shard: the
kernels, copies and memory of such a job and not its network, so the prediction's exposed communication is
taken off.

| run | measured, ms | predicted, ms | error | own products | reserved, GiB | error |
|---|---|---|---|---|---|---|
"""
TAIL = """
- Host: {events}
  were set by the two runs marked with a star and by one published step on a bare host
  (`zsim/presets/frameworks.toml`); the rest follows. Before, these two and Llama's other two of 64 and 2,048
  tokens were predicted 39 to 77 % too fast and GPT-2 XL 36 %: a kernel's launch alone was counted.
- Products: alone they reach 0.766 of the peak on this GPU with today's cuBLAS, 0.64 if nothing else runs for
  three seconds (697 of 700 W, 1,356 of 1,980 MHz: `power.json`), 0.80 to 0.82 in these steps. `dgx-h100` has
  0.69 with a ramp by inner dimension, as 73 published steps on clusters sustain, of older libraries and
  beside NCCL. So a single GPU is predicted too slow where products bound it, and that stays: one GPU does not
  outweigh clusters. For one GPU or new libraries there is the file `h100-sxm-80gb-cuda13`, to which no step
  here was fitted.
- Offload: every byte that goes over PCIe is the trace's (4.94 and 2.47 GB, 7.41 and 4.94 GB in stage 3, 2.47
  of them from pageable memory). DeepSpeed's Adam took 0.39 s on these 16 virtual cores, 0.65 here.
- Attention: torch 2.11 runs cuDNN's kernels on this GPU.
- gemma2 with eager attention had its memory full: 14 retries of the allocator in 9 steps.
"""


@dataclass(frozen=True)
class Step:
    """A measured step and its prediction, also with the GPU's own products; seconds and bytes."""

    name: str
    measured: float
    predicted: float
    with_own_products: float
    reserved: int
    predicted_reserved: int

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def own_error(self) -> float:
        return self.with_own_products / self.measured - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_reserved / self.reserved - 1

    @property
    def line(self) -> str:
        star = "*" if self.name in FITTED else ""
        cells = [
            self.name.replace("_", " ").replace("- ", " ") + star,
            f"{self.measured * 1e3:.1f}",
            f"{self.predicted * 1e3:.1f}",
            f"{self.error:+.1%}",
            f"{self.own_error:+.1%}",
            f"{self.reserved / 2**30:.2f}",
            f"{self.memory_error:+.1%}",
        ]
        return f"| {' | '.join(cells)} |"


def experiment(asked: Mapping[str, Any], models: Path, cluster: Mapping[str, Any]) -> zsim.Experiment:
    """The measured run's own question; `models`: a folder for its cut model."""
    training = {
        "sequence_length": int(asked["sequence_length"]),
        "micro_batch_size": int(asked["micro_batch_size"]),
        "activation_checkpointing": asked["activation_checkpointing"],
    }
    if asked.get("attention") == "eager":
        training["attention"] = "math"
    if asked.get("compile"):
        training["compile"] = True
    if asked.get("lora"):
        training["lora"] = {"rank": asked["lora"], "targets": "all-linear", "dtype": "bf16"}
    return zsim.Experiment(
        model=str(cut_model(asked["model"], models)),
        cluster=dict(cluster),
        gpus=int(asked.get("world_size", 1)),
        training=training,
        strategy=strategy(asked),
    )


def strategy(asked: Mapping[str, Any]) -> dict[str, Any]:
    if asked["trainer"] == "fsdp2":
        return {"kind": "fsdp2", "wrapping": "torchtitan-0.1", "param_dtype": "bf16", "reduce_dtype": "fp32"}
    zero: dict[str, Any] = {"stage": asked["stage"]}
    if asked["offload"] == "cpu":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return {"kind": "deepspeed", "config": {"bf16": {"enabled": True}, "zero_optimization": zero}}


def cut_model(name: str, folder: Path) -> Path:
    """A preset's config.json with so many blocks as `name@blocks` says."""
    path = folder / f"{name.replace('@', '_')}.json"
    path.write_text(json.dumps(cut_preset(name)))
    return path


def steps(names: tuple[str, ...] = ()) -> Iterator[Step]:
    """Every measured step, or those named, with its predictions."""
    with tempfile.TemporaryDirectory() as models:
        for path in sorted(FOLDER.glob("*_t*_b*.json")):
            measured = json.loads(path.read_text())
            if "asked" in measured and (not names or path.stem in names):
                yield predict(path.stem, measured, Path(models))


def predict(name: str, measured: Mapping[str, Any], models: Path) -> Step:
    is_fake = int(measured["asked"].get("world_size", 1)) > 1
    seconds: list[float] = []
    reserved = 0
    for cluster in (CLUSTER, CLUSTER | {"gpu": OWN_PRODUCTS}):
        report = zsim.simulate(experiment(measured["asked"], models, cluster)).report.to_dict()
        exposed = report["breakdown_seconds"]["exposed_communication"] if is_fake else 0.0
        seconds.append(report["step_seconds"] - exposed)
        reserved = report["allocator"]["reserved_bytes"]
    step_seconds = measured["step_seconds"]["median"]
    return Step(
        name, step_seconds, seconds[0], seconds[1], measured["cuda_memory"]["peak_reserved"], reserved
    )


def page(found: list[Step]) -> str:
    rest = [step for step in found if step.name not in FITTED]
    summary = (
        f"\n\nOf the {len(rest)} without a star: {_errors([step.error for step in rest])}; with this GPU's "
        f"own products {_errors([step.own_error for step in rest])}. Reserved memory: "
        f"{_errors([step.memory_error for step in rest])}.\n"
    )
    events = ", ".join(f"`{event}`" for group in FITTED.values() for event in group)
    return HEAD + "\n".join(step.line for step in found) + summary + TAIL.format(events=events)


def _errors(errors: list[float]) -> str:
    size = list(map(abs, errors))
    return f"mean absolute error {mean(size):.1%}, median {median(size):.1%}, bias {mean(errors):+.1%}"


def main() -> int:
    PAGE.write_text(page(list(steps())))
    print(PAGE.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
