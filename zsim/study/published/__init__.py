"""Tables of published runs and zsim's predictions of them."""
