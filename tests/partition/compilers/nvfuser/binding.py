"""The real `nvfuser_direct`, imported with a GPU or without one.

nvFuser writes and prints a definition, and says how it would schedule it, without a driver. But its import asks the
device what a launch may be as large as, and fails where there is none. So that these are asked of a small library here,
which answers for an H100, it is loaded before nvFuser is.
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

__all__ = ["imported_binding"]

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


def imported_binding() -> Any:
    """Import `nvfuser_direct`.

    Raises:
        ImportError: it is not installed, or was built for another torch.
        OSError, CalledProcessError: without a GPU, where there is no C++ compiler, or it cannot compile for this torch.
    """
    # What is there already may be the stand-in, under its name.
    imported = "nvfuser_direct" in sys.modules
    if not imported and not torch.cuda.is_available() and importlib.util.find_spec("nvfuser_direct") is not None:
        _answer_for_a_device()
    return importlib.import_module("nvfuser_direct")


def _answer_for_a_device() -> None:
    # CUDA's headers come with Triton.
    found = importlib.util.find_spec("triton")
    assert found is not None
    assert found.origin is not None
    headers = Path(found.origin).parent / "backends" / "nvidia" / "include"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "no_device.so"
        compiler = [os.environ.get("CXX", "c++"), "-std=c++17", "-shared", "-fPIC", f"-I{headers}"]
        source = ["-x", "c++", "-", "-o", str(library)]
        subprocess.run([*compiler, *source], input=_PROPERTIES_OF_AN_H100, text=True, check=True)
        # For all, and first: what is loaded after it finds these names here.
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
