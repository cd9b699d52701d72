"""Tables of published runs, predicted."""
