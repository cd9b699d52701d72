"""A plan's memory, summed without a clock."""
