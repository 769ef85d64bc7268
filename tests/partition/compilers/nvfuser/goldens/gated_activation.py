"""The definitions of gated_activation, forward and backward; written by write_goldens."""

import torch


def forward_0(fd, DataType):
    t0 = fd.define_tensor(shape=[-1, -1], contiguity=[False, True], dtype=DataType.BFloat16, stride_order=[1, 0])
    t1 = fd.define_tensor(shape=[-1, -1], contiguity=[False, True], dtype=DataType.BFloat16, stride_order=[1, 0])
    t2 = fd.ops.cast(arg=t0, dtype=DataType.Float)
    t3 = fd.ops.cast(arg=t1, dtype=DataType.Float)
    t4 = fd.ops.mul(t2, 0.5)
    t5 = fd.ops.mul(t2, 0.7071067811865476)
    t6 = fd.ops.erf(t5)
    t7 = fd.ops.add(t6, 1.0)
    t8 = fd.ops.mul(t4, t7)
    t9 = fd.ops.mul(t8, t3)
    t10 = fd.ops.cast(arg=t9, dtype=DataType.BFloat16)
    fd.add_output(output=t10)


def backward_0(fd, DataType):
    t0 = fd.define_tensor(shape=[-1, -1], contiguity=[False, True], dtype=DataType.BFloat16, stride_order=[1, 0])
    t1 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.BFloat16, stride_order=[1, 0])
    t2 = fd.define_tensor(shape=[-1, -1], contiguity=[False, True], dtype=DataType.BFloat16, stride_order=[1, 0])
    t3 = fd.ops.cast(arg=t0, dtype=DataType.Float)
    t4 = fd.ops.cast(arg=t1, dtype=DataType.Float)
    t5 = fd.ops.cast(arg=t2, dtype=DataType.Float)
    t6 = fd.ops.mul(t3, 0.5)
    t7 = fd.ops.mul(t3, 0.7071067811865476)
    t8 = fd.ops.erf(t7)
    t9 = fd.ops.add(t8, 1.0)
    t10 = fd.ops.mul(t6, t9)
    t11 = fd.ops.mul(t4, t10)
    t12 = fd.ops.mul(t4, t5)
    t13 = fd.ops.mul(t9, 0.5)
    t14 = fd.ops.mul(t3, t3)
    t15 = fd.ops.mul(t14, -0.5)
    t16 = fd.ops.exp(t15)
    t17 = fd.ops.mul(t16, 0.3989422804014327)
    t18 = fd.ops.mul(t3, t17)
    t19 = fd.ops.add(t13, t18)
    t20 = fd.ops.mul(t12, t19)
    t21 = fd.ops.cat(tensors=[t20, t11], dim=1)
    t22 = fd.ops.cast(arg=t21, dtype=DataType.BFloat16)
    fd.add_output(output=t22)


REGIONS = (
    (forward_0, [((6, 12), (24, 1), torch.bfloat16), ((6, 12), (24, 1), torch.bfloat16)]),
    (backward_0, [((6, 12), (24, 1), torch.bfloat16), ((6, 12), (12, 1), torch.bfloat16), ((6, 12), (24, 1), torch.bfloat16)]),
)
