"""Step time over the number of GPUs."""
