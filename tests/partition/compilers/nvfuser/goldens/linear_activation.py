"""The definitions of linear_activation, forward and backward; written by write_goldens."""

import torch


def forward_0(fd, DataType):
    t0 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.BFloat16, stride_order=[1, 0])
    t1 = fd.ops.cast(arg=t0, dtype=DataType.Float)
    t2 = fd.ops.mul(t1, 0.5)
    t3 = fd.ops.mul(t1, 0.7071067811865476)
    t4 = fd.ops.erf(t3)
    t5 = fd.ops.add(t4, 1.0)
    t6 = fd.ops.mul(t2, t5)
    t7 = fd.ops.cast(arg=t6, dtype=DataType.BFloat16)
    fd.add_output(output=t7)


def backward_0(fd, DataType):
    t0 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.BFloat16, stride_order=[1, 0])
    t1 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.BFloat16, stride_order=[1, 0])
    t2 = fd.ops.cast(arg=t0, dtype=DataType.Float)
    t3 = fd.ops.cast(arg=t1, dtype=DataType.Float)
    t4 = fd.ops.mul(t3, 0.7071067811865476)
    t5 = fd.ops.erf(t4)
    t6 = fd.ops.add(t5, 1.0)
    t7 = fd.ops.mul(t6, 0.5)
    t8 = fd.ops.mul(t3, t3)
    t9 = fd.ops.mul(t8, -0.5)
    t10 = fd.ops.exp(t9)
    t11 = fd.ops.mul(t10, 0.3989422804014327)
    t12 = fd.ops.mul(t3, t11)
    t13 = fd.ops.add(t7, t12)
    t14 = fd.ops.mul(t2, t13)
    t15 = fd.ops.sum(arg=t14, dims=[0], keepdim=True)
    t16 = fd.ops.cast(arg=t14, dtype=DataType.BFloat16)
    fd.add_output(output=t16)
    t17 = fd.ops.cast(arg=t15, dtype=DataType.BFloat16)
    fd.add_output(output=t17)


REGIONS = (
    (forward_0, [((6, 8), (8, 1), torch.bfloat16)]),
    (backward_0, [((6, 8), (8, 1), torch.bfloat16), ((6, 8), (8, 1), torch.bfloat16)]),
)
