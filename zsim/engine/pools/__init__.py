"""The pools of an allocator: each simulated by itself, and the repeats in its requests."""
