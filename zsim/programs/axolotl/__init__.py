"""Reader of axolotl's files."""
