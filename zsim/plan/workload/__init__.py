"""A model's modules as kernels and allocations of a micro-batch."""
