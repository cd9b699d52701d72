"""The best configuration that fits."""
