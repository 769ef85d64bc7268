"""What only developers measure. It is not installed; run it from a checkout, as `python -m benchmarks.partition`."""
