"""Views of a comparison: text and HTML."""
