"""Run an op in C++ from an installed wheel, on a machine without a compiler. `make wheel` calls this script."""

import shutil
import sys
from pathlib import Path

import torch

import fuselayers
from fuselayers import ops
from fuselayers.ops.bias_activation_dropout import bias_activation_dropout_reference
from fuselayers.ops.cpu import has_kernels


def main() -> None:
    assert Path(fuselayers.__file__).is_relative_to(sys.prefix), f"not the installed package: {fuselayers.__file__}"
    assert not any(map(shutil.which, ("c++", "g++", "cc", "gcc"))), "this environment has a compiler"
    assert has_kernels(), "the wheel has no kernels for this CPU"
    x, bias = torch.randn(64, 256), torch.randn(256)
    options = {"activation": "gelu", "p": 0.1, "seed": ops.draw_seed()}
    y = ops.bias_activation_dropout(x, bias, backend="cpp", **options)
    wanted = bias_activation_dropout_reference(x.double(), bias.double(), **options)
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)
    print(f"fuselayers {fuselayers.__version__}: the kernels of the wheel run on this CPU")


if __name__ == "__main__":
    main()
