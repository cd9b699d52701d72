"""A model as one rank of a tensor-, context- or pipeline-parallel group has it: functions from model to
model."""
