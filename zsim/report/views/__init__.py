"""Views of a report: text and HTML."""
