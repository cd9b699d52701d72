"""Reader of torchtune's files."""
