"""What a person reads: breakdown, memory, traffic, figures, pages."""
