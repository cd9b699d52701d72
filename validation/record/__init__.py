"""Record real runs: which collectives, of which sizes, in which order, how long, how much memory.

    python -m validation.record --list
    python -m validation.record zero3-even --ranks 2 --out traces/gloo
    python -m validation.record --all traces/gloo          the recorded cases, all of them again
    python -m validation.record --everything traces        and the oracle's answers, and the shaped link
    torchrun --nproc-per-node 8 -m validation.record zero3-even --out traces/nccl    with GPUs

A recording is a folder with `summary.json` (everything that tests read), and per rank its span log
`rank0.jsonl.gz` (see `validation.tracing`); `--kineto` adds PyTorch's own trace of one step.
`traces/README.md` says what the fields mean."""
