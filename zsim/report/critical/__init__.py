"""The chain of operations that makes the step as long as it is."""
