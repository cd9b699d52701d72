"""DeepSpeed's JSON, as its releases read it."""
