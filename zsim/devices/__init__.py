"""GPUs, allocators and node resources at work on the simulated clock."""
