"""The memory of a plan, computed from the order of its changes, without a clock."""
