import subprocess
import sys


def test_without_triton_the_ops_run_in_plain_torch_and_say_what_is_missing() -> None:
    code = """
import sys
sys.modules["triton"] = None
import torch
from fuselayers import ops
from tests.testing.meter import metered
x = torch.tensor([[-1.0, 2.0]])
assert ops.bias_activation_dropout(x, activation="relu").tolist() == [[0.0, 2.0]]
for call in lambda: ops.bias_activation_dropout(x, activation="relu", backend="triton"), metered().__enter__:
    try:
        call()
    except Exception as error:
        print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout == (
        "BackendUnavailableError backend 'triton' cannot run here: Triton is not installed; on Linux: pip install "
        "triton; or use backend='auto'\n"
        "RuntimeError the meter needs Triton's interpreter, and Triton is not installed; pip install triton\n"
    )
