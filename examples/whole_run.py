"""A run of 100 billion tokens on 32 nodes that fail: how many days, and how often to save?"""

import zsim

run = zsim.simulate_run(
    zsim.Experiment(
        model="llama-3-8b",
        cluster="dgx-h100",
        nodes=32,
        strategy=zsim.Fsdp2(),
        training=zsim.Training(sequence_length=8192, activation_checkpointing="full"),
        run={"tokens": 1e11, "checkpoint": {"every": "auto"}, "seeds": 20},
    )
)
print(run)
low, high = run.days_range
print(f"{run.expected_days:.2f} days ({low:.2f} to {high:.2f})")
print(f"{run.goodput_fraction:.1%} of the time is kept")
