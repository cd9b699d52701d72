"""Optimizer states on the GPU, in host memory or on NVMe drives: what does the step wait for?"""

import zsim


def job(device: str) -> zsim.Experiment:
    """Llama 3.1 8B with ZeRO-3 on 8 H100, its optimizer states on `device`."""
    zero = {"stage": 3, "offload_optimizer": {"device": device}}
    if device == "nvme":
        zero["offload_optimizer"]["nvme_path"] = "/nvme"
    return zsim.Experiment(
        model="llama-3.1-8b",
        cluster="dgx-h100",
        nodes=1,
        strategy=zsim.DeepSpeed(config={"zero_optimization": zero, "bf16": {"enabled": True}}),
        training=zsim.Training(micro_batch_size=1, sequence_length=4096, activation_checkpointing="full"),
    )


for device in ("none", "cpu", "nvme"):
    report = zsim.simulate(job(device)).report
    stall, host = report.breakdown.seconds["offload_stall"], report.peaks["host"].total / 1e9
    print(f"{device:<5} step {report.step_seconds:7.3f} s, waits {stall:7.3f} s, host {host:6.1f} GB")

# Which bandwidth would hide it?
print()
print(zsim.needs(job("nvme")))
