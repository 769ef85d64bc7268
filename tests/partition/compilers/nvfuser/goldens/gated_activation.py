"""The definitions of gated_activation, forward and backward; written by write_goldens."""

import torch


def forward_0(fd, DataType):
    t0 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.BFloat16, stride_order=[1, 0])
    t1 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.BFloat16, stride_order=[1, 0])
    t2 = fd.ops.cast(arg=t0, dtype=DataType.Float)
    t3 = fd.ops.cast(arg=t1, dtype=DataType.Float)
    t4 = fd.ops.silu(t2)
    t5 = fd.ops.mul(t4, t3)
    t6 = fd.ops.cast(arg=t5, dtype=DataType.BFloat16)
    fd.add_output(output=t6)


def backward_0(fd, DataType):
    t0 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.BFloat16, stride_order=[1, 0])
    t1 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.BFloat16, stride_order=[1, 0])
    t2 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.BFloat16, stride_order=[1, 0])
    t3 = fd.ops.cast(arg=t0, dtype=DataType.Float)
    t4 = fd.ops.cast(arg=t1, dtype=DataType.Float)
    t5 = fd.ops.cast(arg=t2, dtype=DataType.Float)
    t6 = fd.ops.silu(t3)
    t7 = fd.ops.mul(t4, t6)
    t8 = fd.ops.mul(t4, t5)
    t9 = fd.ops.sigmoid(t3)
    t10 = fd.ops.mul(t8, t9)
    t11 = fd.ops.sub(1.0, t9)
    t12 = fd.ops.mul(t3, t11)
    t13 = fd.ops.add(t12, 1.0)
    t14 = fd.ops.mul(t10, t13)
    t15 = fd.ops.cast(arg=t7, dtype=DataType.BFloat16)
    fd.add_output(output=t15)
    t16 = fd.ops.cast(arg=t14, dtype=DataType.BFloat16)
    fd.add_output(output=t16)


REGIONS = (
    (forward_0, [((6, 20), (20, 1), torch.bfloat16), ((6, 20), (20, 1), torch.bfloat16)]),
    (backward_0, [((6, 20), (20, 1), torch.bfloat16), ((6, 20), (20, 1), torch.bfloat16), ((6, 20), (20, 1), torch.bfloat16)]),
)
