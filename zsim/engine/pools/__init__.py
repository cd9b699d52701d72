"""The pools of an allocator, each settled by itself, and what repeats in them."""
