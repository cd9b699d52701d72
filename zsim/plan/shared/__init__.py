"""Parts of a step that several frameworks share."""
