"""Measurements for developers. They are not installed; run them from a checkout: `python -m benchmarks.partition`."""
