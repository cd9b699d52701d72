"""Should I believe this? What the numbers of one report rest on."""
