"""`[run]` of an experiment: how long it goes on, what is saved, what fails, and how it recovers."""
