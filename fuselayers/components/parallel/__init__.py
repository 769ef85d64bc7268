"""Tensor and sequence parallelism: a model divided among the processes of a group."""

from .parallelize import parallelize as parallelize
