"""Checkpoints that frameworks write: their files, the bytes of the tensors in them, and what they take.

    python -m validation.checkpoints --out traces/checkpoints       all; DeepSpeed's where it is installed
    python -m validation.checkpoints --only fsdp2 --ranks 2         some, printed

A configuration trains a small Llama for two steps on 2 or 4 gloo ranks and saves. `files.json` has each
file's bytes, and the bytes of the tensors in it, read from the archives that torch.save makes.

    python -m validation.checkpoints.clock --out traces/checkpoints

writes `clock.json`: how long saves and loads take here, and the rates of this machine that they follow from,
measured without torch's checkpoints.

    python -m validation.checkpoints.quiet --out traces/checkpoints

writes "quiet" of it: the rates of zsim's preset, with nothing beside them.
"""
