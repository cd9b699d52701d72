"""The recipe of fp8 training that an experiment asks for, checked against GPU, framework and shapes."""
