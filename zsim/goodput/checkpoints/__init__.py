"""One save of a job: which rank writes which bytes into which file, and how long that takes."""
