"""The studies in Python: results that display themselves, with the same numbers as the commands'."""
