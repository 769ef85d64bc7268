"""Build the definitions that the tests wrote with the real nvFuser: `make test-nvfuser`.

    python build_definitions.py FOLDER

It needs torch and `nvfuser_direct`, but no GPU. It imports nothing of this library, since nvFuser's newest wheel is
built for a torch that is older than this library's oldest.
"""

import ctypes
import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

__all__ = ["build"]

# nvFuser's import asks the device for these limits, though building a definition needs no device.
_PROPERTIES_OF_AN_H100 = """
#include <driver_types.h>

namespace at::cuda {

cudaDeviceProp* getCurrentDeviceProperties() {
  static cudaDeviceProp properties = [] {
    cudaDeviceProp made{};
    made.major = 9;
    made.multiProcessorCount = 132;
    made.warpSize = 32;
    made.maxThreadsPerBlock = 1024;
    made.maxThreadsPerMultiProcessor = 2048;
    made.maxBlocksPerMultiProcessor = 32;
    made.maxThreadsDim[0] = made.maxThreadsDim[1] = 1024;
    made.maxThreadsDim[2] = 64;
    made.maxGridSize[0] = 2147483647;
    made.maxGridSize[1] = made.maxGridSize[2] = 65535;
    made.regsPerBlock = made.regsPerMultiprocessor = 65536;
    made.sharedMemPerBlock = 49152;
    made.sharedMemPerBlockOptin = 232448;
    made.sharedMemPerMultiprocessor = 233472;
    made.reservedSharedMemPerBlock = 1024;
    made.l2CacheSize = 52428800;
    made.memoryBusWidth = 5120;
    made.memoryClockRate = 2619000;
    return made;
  }();
  return &properties;
}

cudaDeviceProp* getDeviceProperties(signed char) { return getCurrentDeviceProperties(); }

int warp_size() { return 32; }

}  // namespace at::cuda

namespace c10::cuda {

signed char current_device() { return 0; }

}  // namespace c10::cuda
"""


def build(script: str, package: Any) -> None:
    """Build the definition that a script describes; `package` is `nvfuser_direct`.

    Raises:
        Exception: nvFuser's error, if it refuses the definition.
    """
    with package.FusionDefinition() as definition:
        exec(script, {"fd": definition, "DataType": package.DataType})


def _answer_for_a_device() -> None:
    """Load a library that answers in place of a GPU: the first library that defines a name is used."""
    triton = importlib.util.find_spec("triton")  # its wheel holds CUDA's headers
    assert triton is not None
    assert triton.origin is not None
    headers = Path(triton.origin).parent / "backends" / "nvidia" / "include"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "no_device.so"
        compiler = [os.environ.get("CXX", "c++"), "-std=c++17", "-shared", "-fPIC", f"-I{headers}"]
        source = ["-x", "c++", "-", "-o", str(library)]
        subprocess.run([*compiler, *source], input=_PROPERTIES_OF_AN_H100, text=True, check=True)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def main(folder: Path) -> int:
    """Build every definition in the folder; return 1 if one fails or there are none."""
    if not torch.cuda.is_available():
        _answer_for_a_device()
    package = importlib.import_module("nvfuser_direct")
    scripts = sorted(folder.glob("*.py"))
    failures = 0
    for path in scripts:
        try:
            build(path.read_text(), package)
        except Exception as error:
            failures += 1
            print(f"{path}: {error}", file=sys.stderr)
    print(f"nvFuser {package.version()}: built {len(scripts) - failures} of {len(scripts)} definitions")
    return int(failures > 0 or not scripts)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
