"""Reader of litgpt's files."""
