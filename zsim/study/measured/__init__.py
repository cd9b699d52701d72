"""Tables of measured runs and zsim's predictions of them."""
