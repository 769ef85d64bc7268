"""cpp -- C++ of ours, compiled by Inductor's cache of C++ code."""

import ctypes


def load_cpp(source: str) -> ctypes.CDLL:
    """Compile C++ into a library and load it; the library is kept on disk, beside Inductor's own code.

    Inductor's flags apply: OpenMP, this machine's instructions, and CPU_CAPABILITY_AVX2 or CPU_CAPABILITY_AVX512.
    Checked with torch 2.11 and 2.13.

    Raises:
        RuntimeError, OSError: there is no C++ compiler, or it fails.
    """
    from torch._inductor.codecache import CppCodeCache

    library: ctypes.CDLL = CppCodeCache.load(source)
    return library
