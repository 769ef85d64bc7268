"""`python -m fuselayers` is the command `fuselayers`."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
