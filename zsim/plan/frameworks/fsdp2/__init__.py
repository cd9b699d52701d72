"""fully_shard, torch's second."""
