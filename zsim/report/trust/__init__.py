"""Should I believe this? The evidence behind the numbers of one report."""
