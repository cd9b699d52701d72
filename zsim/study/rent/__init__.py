"""Which cluster to rent, and how many of its GPUs."""
