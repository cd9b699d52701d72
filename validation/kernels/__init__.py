"""zsim's prices of kernels beside measured ones."""
