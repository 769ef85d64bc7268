"""The definitions of residual_layer_norm, forward and backward; written by write_goldens."""

import torch


def forward_0(fd, DataType):
    t0 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.BFloat16, stride_order=[1, 0])
    t1 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.BFloat16, stride_order=[1, 0])
    t2 = fd.define_tensor(shape=[-1], contiguity=[True], dtype=DataType.BFloat16, stride_order=[0])
    t3 = fd.define_tensor(shape=[-1], contiguity=[True], dtype=DataType.BFloat16, stride_order=[0])
    t4 = fd.ops.cast(arg=t0, dtype=DataType.Float)
    t5 = fd.ops.cast(arg=t1, dtype=DataType.Float)
    t6 = fd.ops.cast(arg=t2, dtype=DataType.Float)
    t7 = fd.ops.cast(arg=t3, dtype=DataType.Float)
    t8 = fd.ops.add(t4, t5)
    t9, t10 = fd.ops.var_mean(arg=t8, dims=[1], correction=0, keepdim=True)
    t11 = fd.ops.add(t9, 1e-05)
    t12 = fd.ops.rsqrt(t11)
    t13 = fd.ops.sub(t8, t10)
    t14 = fd.ops.mul(t13, t12)
    t15 = fd.ops.broadcast(arg=t6, is_broadcast_dim=[True, False])
    t16 = fd.ops.mul(t14, t15)
    t17 = fd.ops.broadcast(arg=t7, is_broadcast_dim=[True, False])
    t18 = fd.ops.add(t16, t17)
    t19 = fd.ops.cast(arg=t8, dtype=DataType.BFloat16)
    fd.add_output(output=t19)
    t20 = fd.ops.cast(arg=t18, dtype=DataType.BFloat16)
    fd.add_output(output=t20)


def backward_0(fd, DataType):
    t0 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.BFloat16, stride_order=[1, 0])
    t1 = fd.define_tensor(shape=[-1], contiguity=[True], dtype=DataType.BFloat16, stride_order=[0])
    t2 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.BFloat16, stride_order=[1, 0])
    t3 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.BFloat16, stride_order=[1, 0])
    t4 = fd.ops.cast(arg=t0, dtype=DataType.Float)
    t5 = fd.ops.cast(arg=t1, dtype=DataType.Float)
    t6 = fd.ops.cast(arg=t2, dtype=DataType.Float)
    t7 = fd.ops.cast(arg=t3, dtype=DataType.Float)
    t8 = fd.ops.broadcast(arg=t5, is_broadcast_dim=[True, False])
    t9 = fd.ops.mul(t4, t8)
    t10 = fd.ops.mul(t9, 24.0)
    t11 = fd.ops.sum(arg=t9, dims=[1], keepdim=True)
    t12, t13 = fd.ops.var_mean(arg=t6, dims=[1], correction=0, keepdim=True)
    t14 = fd.ops.add(t12, 1e-05)
    t15 = fd.ops.rsqrt(t14)
    t16 = fd.ops.sub(t6, t13)
    t17 = fd.ops.mul(t16, t15)
    t18 = fd.ops.mul(t9, t17)
    t19 = fd.ops.sum(arg=t18, dims=[1], keepdim=True)
    t20 = fd.ops.mul(t17, t19)
    t21 = fd.ops.sub(t10, t11)
    t22 = fd.ops.sub(t21, t20)
    t23 = fd.ops.truediv(t15, 24.0)
    t24 = fd.ops.mul(t23, t22)
    t25 = fd.ops.mul(t4, t17)
    t26 = fd.ops.sum(arg=t25, dims=[0])
    t27 = fd.ops.sum(arg=t4, dims=[0])
    t28 = fd.ops.add(t7, t24)
    t29 = fd.ops.cast(arg=t26, dtype=DataType.BFloat16)
    fd.add_output(output=t29)
    t30 = fd.ops.cast(arg=t27, dtype=DataType.BFloat16)
    fd.add_output(output=t30)
    t31 = fd.ops.cast(arg=t28, dtype=DataType.BFloat16)
    fd.add_output(output=t31)


REGIONS = (
    (forward_0, [((6, 24), (24, 1), torch.bfloat16), ((6, 24), (24, 1), torch.bfloat16), ((24,), (1,), torch.bfloat16), ((24,), (1,), torch.bfloat16)]),
    (backward_0, [((6, 24), (24, 1), torch.bfloat16), ((24,), (1,), torch.bfloat16), ((6, 24), (24, 1), torch.bfloat16), ((6, 24), (24, 1), torch.bfloat16)]),
)
