"""Models: modules with parameters, products and activations, and how a config.json becomes them."""
