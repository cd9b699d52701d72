"""The experiment file: its tables, how it is read and changed, and the Job that it resolves to."""
