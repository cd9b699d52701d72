"""Reports as people read them."""
