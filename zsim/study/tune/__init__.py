"""Search for the best configuration that fits."""
