"""Running kernels and holding bytes."""
