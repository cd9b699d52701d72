"""Megatron-Core's DistributedDataParallel and distributed optimizer."""
