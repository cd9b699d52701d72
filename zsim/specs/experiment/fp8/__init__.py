"""The recipe of fp8 training: what an experiment asks for, held against GPU, framework and shapes."""
