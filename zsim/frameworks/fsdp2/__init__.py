"""FSDP2: torch's fully_shard."""
