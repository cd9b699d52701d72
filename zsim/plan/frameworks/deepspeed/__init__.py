"""DeepSpeed's engine."""
