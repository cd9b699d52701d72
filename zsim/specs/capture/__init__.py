"""A torch module becomes a model: run once on the meta device, forward and backward, and recorded."""
