"""Pipeline schedules: the order of micro-batches as lists of actions, and the runner of a list."""
