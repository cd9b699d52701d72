"""Python's own face of the studies: results that show themselves, the same numbers as the commands'."""
