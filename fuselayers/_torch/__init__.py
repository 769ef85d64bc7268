"""The private names of torch that this package needs. Checked with torch 2.12.0, 2.13.0 and 2.14.1.

    collectives   functional collectives of torch.distributed
    cpp_files     one C++ file for all of Inductor's CPU kernels of a graph
    dispatch      ops, storages, fake tensors, and the modes, transforms and hooks that act on calls
    guards        Dynamo: compile a function behind guards
    inductor      compile with Inductor, and the code that it gets for this library's ops
    onednn        products of matrices by oneDNN
    tracing       FX graphs and AOTAutograd's joint graphs

Dynamo, Inductor and sympy take longer to import than torch itself, so functions import them when they are called.
"""
