"""The simulation of a plan on hardware: pricing, classes of ranks, executor, allocator, jitter."""
