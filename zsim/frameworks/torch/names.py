"""Names that torch's engines share with those that do the same."""

UNSHARDED = "DDP"  # what any framework is on one GPU, where nothing is sharded
