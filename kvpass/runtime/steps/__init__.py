"""Decode steps that are called again without Dynamo: replayed as CUDA graphs, or recalled on CPUs."""
