"""How fast an idle device works."""
