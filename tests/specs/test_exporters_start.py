"""The Python and the YAML that zsim writes start on two CPU ranks, by torchrun and `accelerate launch`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.specs.written_files import job_of, write

torch = pytest.importorskip("torch", reason="needs torch: pip install zsim[validate]")
pytestmark = pytest.mark.torch
needs_accelerate = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="needs accelerate: pip install zsim[interop]"
)

# torch's FSDP1 and its offloading ask for a GPU; the others run on CPUs as they are written.
ON_CPUS = (
    *(f"ddp-{precision}" for precision in ("bf16", "fp16", "fp32")),
    *("fsdp2-bf16-bf16", "fsdp2-fp16-fp32", "fsdp2-fp32-fp32", "hsdp-bf16", "everything"),
)
# Both scripts leave without C++'s destructors: there a process of torch 2.13 that ends within a second of its
# group's start is aborted in one of five runs ("terminate called without an active exception"), whether the
# group was ended or not.
TRAIN_WRITTEN = """
import os, sys, torch, torch.distributed as dist
from dataclasses import replace
from validation.llama import SHAPES, Llama

dist.init_process_group("gloo")
for path in sys.argv[1:]:
    written = {}
    exec(compile(open(path).read().replace("block.compile()", "pass"), path, "exec"), written)
    torch.manual_seed(0)
    model = Llama(replace(SHAPES["llama-tiny"], num_hidden_layers=2), code="torchtitan")
    model = written["apply"](model, device_type="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.zeros(1, 32, dtype=torch.int64)
    steps = [tokens] * written["GRADIENT_ACCUMULATION_STEPS"]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    written["train_step"](model, optimizer, lambda m, t: m(t, t).loss, steps)
    moved = [not torch.equal(a.to_local() if hasattr(a, "to_local") else a,
                             b.to_local() if hasattr(b, "to_local") else b)
             for a, b in zip(before, model.parameters())]
    assert any(moved), path
    if dist.get_rank() == 0:
        print("STARTED", path)
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)
"""
TRAIN_ACCELERATE = """
import os, sys
import torch
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(8, 1)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
accelerator.backward(model(torch.ones(1, 8)).sum())
optimizer.step()
if accelerator.is_main_process:
    print("STARTED on", accelerator.num_processes)
accelerator.end_training()
sys.stdout.flush()
os._exit(0)
"""


def started(command: list[str], folder: Path, **more: str) -> str:
    """What a program that ends well prints; `more` is its environment's."""
    root = Path(__file__).parents[2]
    own = {"PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    env = {**os.environ, **own, **more}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_torchrun_starts_every_python_that_cpus_can_run(tmp_path: Path) -> None:
    paths = []
    for name in ON_CPUS:
        (tmp_path / name).mkdir()
        files = write(job_of(name, gpus=2), tmp_path / name).files
        paths.append(str(tmp_path / name / next(file for file in files if file.endswith(".py"))))
    (tmp_path / "train.py").write_text(TRAIN_WRITTEN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    out = started([*torchrun, "train.py", *paths], tmp_path)
    assert [line for line in out.splitlines() if line.startswith("STARTED")] == [
        f"STARTED {path}" for path in paths
    ]


@needs_accelerate
@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepspeed3-bf16-none", "ddp-bf16"])
def test_accelerate_launch_starts_the_yaml_on_two_ranks(name: str, tmp_path: Path) -> None:
    """`mixed_precision` beside `deepspeed_config_file` was refused when the script made its Accelerator."""
    if name.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs DeepSpeed: pip install zsim[interop]")
    write(job_of(name, gpus=2), tmp_path)
    (tmp_path / "train.py").write_text(TRAIN_ACCELERATE)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate.yaml"]
    out = started(
        [*launch, "--main_process_port", "0", "train.py"],
        tmp_path,
        ACCELERATE_USE_CPU="true",
        DS_ACCELERATOR="cpu",
    )
    assert "STARTED on 2" in out
