"""Training runs that others measured and published: their tables, what is known of their sources, and the
errors of zsim on them."""
