"""The definitions of residual_rms_norm, forward and backward; written by write_goldens."""

import torch


def forward_0(fd, DataType):
    t0 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.BFloat16, stride_order=[1, 0])
    t1 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.BFloat16, stride_order=[1, 0])
    t2 = fd.define_tensor(shape=[-1], contiguity=[True], dtype=DataType.BFloat16, stride_order=[0])
    t3 = fd.ops.cast(arg=t0, dtype=DataType.Float)
    t4 = fd.ops.cast(arg=t1, dtype=DataType.Float)
    t5 = fd.ops.cast(arg=t2, dtype=DataType.Float)
    t6 = fd.ops.add(t3, t4)
    t7 = fd.ops.mul(t6, t6)
    t8 = fd.ops.sum(arg=t7, dims=[1], keepdim=True)
    s0 = fd.ops.size(arg=t7, dim=1)
    t9 = fd.ops.truediv(t8, s0)
    t10 = fd.ops.add(t9, 9.999999974752427e-07)
    t11 = fd.ops.rsqrt(t10)
    t12 = fd.ops.mul(t6, t11)
    t13 = fd.ops.broadcast(arg=t5, is_broadcast_dim=[True, False])
    t14 = fd.ops.mul(t12, t13)
    t15 = fd.ops.cast(arg=t6, dtype=DataType.BFloat16)
    fd.add_output(output=t15)
    t16 = fd.ops.cast(arg=t14, dtype=DataType.BFloat16)
    fd.add_output(output=t16)


def backward_0(fd, DataType):
    t0 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.BFloat16, stride_order=[1, 0])
    t1 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.BFloat16, stride_order=[1, 0])
    t2 = fd.define_tensor(shape=[-1], contiguity=[True], dtype=DataType.BFloat16, stride_order=[0])
    t3 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.BFloat16, stride_order=[1, 0])
    t4 = fd.ops.cast(arg=t0, dtype=DataType.Float)
    t5 = fd.ops.cast(arg=t1, dtype=DataType.Float)
    t6 = fd.ops.cast(arg=t2, dtype=DataType.Float)
    t7 = fd.ops.cast(arg=t3, dtype=DataType.Float)
    t8 = fd.ops.mul(t5, t5)
    t9 = fd.ops.sum(arg=t8, dims=[1], keepdim=True)
    s0 = fd.ops.size(arg=t8, dim=1)
    t10 = fd.ops.truediv(t9, s0)
    t11 = fd.ops.add(t10, 9.999999974752427e-07)
    t12 = fd.ops.rsqrt(t11)
    t13 = fd.ops.mul(t5, t12)
    t14 = fd.ops.mul(t4, t13)
    t15 = fd.ops.broadcast(arg=t6, is_broadcast_dim=[True, False])
    t16 = fd.ops.mul(t4, t15)
    t17 = fd.ops.sum(arg=t14, dims=[0], keepdim=True)
    t18 = fd.ops.squeeze(arg=t17, dims=[0])
    t19 = fd.ops.mul(t16, t5)
    t20 = fd.ops.mul(t16, t12)
    t21 = fd.ops.sum(arg=t19, dims=[1], keepdim=True)
    t22 = fd.ops.mul(t21, -0.5)
    t23 = fd.ops.mul(t12, t12)
    t24 = fd.ops.mul(t23, t12)
    t25 = fd.ops.mul(t22, t24)
    t26 = fd.ops.expand(arg=t25, shape=[-1, 24])
    t27 = fd.ops.truediv(t26, 24.0)
    t28 = fd.ops.mul(t5, 2.0)
    t29 = fd.ops.mul(t27, t28)
    t30 = fd.ops.add(t20, t29)
    t31 = fd.ops.add(t7, t30)
    t32 = fd.ops.cast(arg=t18, dtype=DataType.BFloat16)
    fd.add_output(output=t32)
    t33 = fd.ops.cast(arg=t31, dtype=DataType.BFloat16)
    fd.add_output(output=t33)


REGIONS = (
    (forward_0, [((6, 24), (24, 1), torch.bfloat16), ((6, 24), (24, 1), torch.bfloat16), ((24,), (1,), torch.bfloat16)]),
    (backward_0, [((6, 24), (24, 1), torch.bfloat16), ((6, 24), (24, 1), torch.bfloat16), ((24,), (1,), torch.bfloat16), ((6, 24), (24, 1), torch.bfloat16)]),
)
