"""FSDP1: torch's FullyShardedDataParallel."""
