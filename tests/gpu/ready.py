"""Say what a machine lacks for `make gpu`: packages, or a GPU."""

import os
import sys
from importlib import metadata
from pathlib import Path


def missing() -> list[str]:
    """The packages of requirements.txt, torch and Triton that are not installed, in any version."""
    lines = (Path(__file__).parent / "requirements.txt").read_text(encoding="utf-8").splitlines()
    lacking = []
    for line in ["torch", "triton", *(line for line in lines if not line.startswith("#"))]:
        try:
            metadata.version(line.partition("==")[0])
        except metadata.PackageNotFoundError:
            lacking.append(line)
    return lacking


def why_not_ready() -> str | None:
    """Return None if the run can begin, else what to do."""
    lacking = missing()
    if lacking:
        return (
            f"this Python lacks {', '.join(lacking)}; pip install them, or without a network: "
            f"pip install --target folder {' '.join(lacking)} on another machine, then PYTHONPATH=folder make gpu"
        )
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    import torch

    if not torch.cuda.is_available():
        return "torch can use no GPU here; `make gpu-dry` tries the same run without one"
    return None


if __name__ == "__main__":
    reason = why_not_ready()
    if reason is not None:
        sys.exit(f"fuselayers: {reason}")
