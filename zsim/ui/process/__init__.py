"""The processes that work for the page, within bounds."""
