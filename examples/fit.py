"""Does Llama 3 8B fit on one node of 8 A100 with 40 GB, and what would make it?"""

import zsim


def job(checkpointing: str) -> zsim.Experiment:
    """The job with `none`, `selective` or `full` activation checkpointing."""
    training = zsim.Training(sequence_length=8192, activation_checkpointing=checkpointing)
    return zsim.Experiment(
        model="llama-3-8b", cluster="dgx-a100-40gb", nodes=1, strategy=zsim.Fsdp2(), training=training
    )


result = zsim.simulate(job("none"))
report = result.report
used, capacity = report.peaks["gpu"].total, report.capacity_bytes["gpu"]
print(f"{report.verdict.word}: {used / 1e9:.1f} of {capacity / 1e9:.1f} GB")
if report.out_of_memory is not None and report.out_of_memory.remedy is not None:
    print(f"would fit with {report.out_of_memory.remedy.words}")

for checkpointing in ("none", "selective", "full"):
    found = zsim.simulate(job(checkpointing)).report
    print(f"{checkpointing:<10} {found.verdict.word:<13} {found.step_seconds:7.3f} s")

# How far to believe the step: the published runs nearest to it, and what it rests on.
print()
print(zsim.simulate(job("full")).trust)
