"""Runs each layer of LAYERS on a device that is neither the CPU nor torch's meta device, without its kernels."""

import os
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from fuselayers.components.swap import swap
from tests.components.swap.layers import LAYERS, layer


def main() -> None:
    """Run forward and backward of each layer; a tensor on the wrong device raises."""
    # Here, since pytest imports this file too.
    _setup_privateuseone_for_python_backend("other")  # type: ignore[no-untyped-call]
    device: Any = torch.get_device_module("other")
    device.get_amp_supported_dtype = lambda: [torch.bfloat16]
    for name in LAYERS:
        with FakeTensorMode():
            module = layer(name, device="other").train()
            swap(module, level="layers", verify=False).require(LAYERS[name][1])
            given = [torch.empty(6, 8, device="other", requires_grad=True) for _ in range(1 + (name == "bert"))]
            module(*given).sum().backward()
            assert all(x.grad is not None and x.grad.device.type == "other" for x in given), name
        print(name, flush=True)


if __name__ == "__main__":
    main()
    # Autograd's thread of the device may still wait for Python's lock. An ordinary exit would end it there, and with it
    # the process: "terminate called without an active exception".
    os._exit(0)
