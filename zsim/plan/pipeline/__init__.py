"""The order of micro-batches, as data: actions, and the walk that follows them."""
