"""`python -m benchmarks.lint_kernels`."""

import sys

from benchmarks.lint_kernels.command import main

if __name__ == "__main__":
    sys.exit(main())
