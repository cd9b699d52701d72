"""Reports as a page."""
