"""The optimizers by name: bytes of their states, work of their update, the frameworks that take them."""
