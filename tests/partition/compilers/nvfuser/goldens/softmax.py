"""The definitions of softmax, forward and backward; written by write_goldens."""

import torch


def forward_0(fd, DataType):
    t0 = fd.define_tensor(shape=[-1, -1, -1], contiguity=[True, True, True], dtype=DataType.BFloat16, stride_order=[2, 1, 0])
    t1 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.Bool, stride_order=[1, 0])
    t2 = fd.ops.cast(arg=t0, dtype=DataType.Float)
    t3 = fd.ops.mul(t2, 0.5)
    t4 = fd.ops.full(shape=[], fill_value=float("-inf"), dtype=DataType.Float)
    t5 = fd.ops.broadcast(arg=t1, is_broadcast_dim=[True, False, False])
    t6 = fd.ops.broadcast(arg=t4, is_broadcast_dim=[True, True, True])
    t7 = fd.ops.where(t5, t3, t6)
    t8 = fd.ops.max(arg=t7, dims=[2], keepdim=True)
    t9 = fd.ops.sub(t7, t8)
    t10 = fd.ops.exp(t9)
    t11 = fd.ops.sum(arg=t10, dims=[2], keepdim=True)
    t12 = fd.ops.truediv(t10, t11)
    t13 = fd.ops.full(shape=[], fill_value=0.0, dtype=DataType.Float)
    t14 = fd.ops.broadcast(arg=t13, is_broadcast_dim=[True, True, True])
    t15 = fd.ops.where(t5, t12, t14)
    t16 = fd.ops.cast(arg=t15, dtype=DataType.BFloat16)
    fd.add_output(output=t16)


def backward_0(fd, DataType):
    t0 = fd.define_tensor(shape=[-1, -1, -1], contiguity=[True, True, True], dtype=DataType.BFloat16, stride_order=[2, 1, 0])
    t1 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.Bool, stride_order=[1, 0])
    t2 = fd.define_tensor(shape=[-1, -1, -1], contiguity=[True, True, True], dtype=DataType.BFloat16, stride_order=[2, 1, 0])
    t3 = fd.ops.cast(arg=t0, dtype=DataType.Float)
    t4 = fd.ops.cast(arg=t2, dtype=DataType.Float)
    t5 = fd.ops.full(shape=[], fill_value=0.0, dtype=DataType.Float)
    t6 = fd.ops.broadcast(arg=t1, is_broadcast_dim=[True, False, False])
    t7 = fd.ops.broadcast(arg=t5, is_broadcast_dim=[True, True, True])
    t8 = fd.ops.where(t6, t3, t7)
    t9 = fd.ops.mul(t4, 0.5)
    t10 = fd.ops.full(shape=[], fill_value=float("-inf"), dtype=DataType.Float)
    t11 = fd.ops.broadcast(arg=t10, is_broadcast_dim=[True, True, True])
    t12 = fd.ops.where(t6, t9, t11)
    t13 = fd.ops.max(arg=t12, dims=[2], keepdim=True)
    t14 = fd.ops.sub(t12, t13)
    t15 = fd.ops.exp(t14)
    t16 = fd.ops.sum(arg=t15, dims=[2], keepdim=True)
    t17 = fd.ops.truediv(t15, t16)
    t18 = fd.ops.mul(t8, t17)
    t19 = fd.ops.sum(arg=t18, dims=[2], keepdim=True)
    t20 = fd.ops.mul(t17, t19)
    t21 = fd.ops.sub(t18, t20)
    t22 = fd.ops.where(t6, t21, t7)
    t23 = fd.ops.mul(t22, 0.5)
    t24 = fd.ops.cast(arg=t23, dtype=DataType.BFloat16)
    fd.add_output(output=t24)


REGIONS = (
    (forward_0, [((2, 6, 6), (36, 6, 1), torch.bfloat16), ((6, 6), (6, 1), torch.bool)]),
    (backward_0, [((2, 6, 6), (36, 6, 1), torch.bfloat16), ((6, 6), (6, 1), torch.bool), ((2, 6, 6), (36, 6, 1), torch.bfloat16)]),
)
