"""Repeat decode steps without Dynamo: replayed as CUDA graphs, or called again on CPUs."""
