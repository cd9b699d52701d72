"""FLOPs and bytes of a model's kernels."""
