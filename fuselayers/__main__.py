"""`python -m fuselayers` is the command `fuselayers`."""

import os
import sys

from .cli.main import main
from .cli.torchrun import is_launched

if __name__ == "__main__":
    code = main()
    if is_launched():
        # Torch's caches still hold process groups, and gloo may abort the interpreter's end because of them.
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
