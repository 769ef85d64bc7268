"""Inspect the fusion core's work on a function: its graphs, the saved and recomputed values, and the reasons."""
