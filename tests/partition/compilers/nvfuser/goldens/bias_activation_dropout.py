"""The definitions of bias_activation_dropout, forward and backward; written by write_goldens."""

import torch


def forward_0(fd, DataType):
    t0 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.BFloat16, stride_order=[1, 0])
    t1 = fd.define_tensor(shape=[-1], contiguity=[True], dtype=DataType.BFloat16, stride_order=[0])
    t2 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], stride_order=[1, 0])
    t3 = fd.ops.cast(arg=t0, dtype=DataType.Float)
    t4 = fd.ops.cast(arg=t1, dtype=DataType.Float)
    t5 = fd.ops.broadcast(arg=t4, is_broadcast_dim=[True, False])
    t6 = fd.ops.add(t3, t5)
    t7 = fd.ops.mul(t6, 0.5)
    t8 = fd.ops.mul(t6, 0.7071067811865476)
    t9 = fd.ops.erf(t8)
    t10 = fd.ops.add(t9, 1.0)
    t11 = fd.ops.mul(t7, t10)
    t12 = fd.ops.mul(t2, 1.3333333333333333)
    t13 = fd.ops.mul(t11, t12)
    t14 = fd.ops.cast(arg=t13, dtype=DataType.BFloat16)
    fd.add_output(output=t14)


def backward_0(fd, DataType):
    t0 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.BFloat16, stride_order=[1, 0])
    t1 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], stride_order=[1, 0])
    t2 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.BFloat16, stride_order=[1, 0])
    t3 = fd.define_tensor(shape=[-1], contiguity=[True], dtype=DataType.BFloat16, stride_order=[0])
    t4 = fd.ops.cast(arg=t0, dtype=DataType.Float)
    t5 = fd.ops.cast(arg=t2, dtype=DataType.Float)
    t6 = fd.ops.cast(arg=t3, dtype=DataType.Float)
    t7 = fd.ops.mul(t1, 1.3333333333333333)
    t8 = fd.ops.mul(t4, t7)
    t9 = fd.ops.broadcast(arg=t6, is_broadcast_dim=[True, False])
    t10 = fd.ops.add(t5, t9)
    t11 = fd.ops.mul(t10, 0.7071067811865476)
    t12 = fd.ops.erf(t11)
    t13 = fd.ops.add(t12, 1.0)
    t14 = fd.ops.mul(t13, 0.5)
    t15 = fd.ops.mul(t10, t10)
    t16 = fd.ops.mul(t15, -0.5)
    t17 = fd.ops.exp(t16)
    t18 = fd.ops.mul(t17, 0.3989422804014327)
    t19 = fd.ops.mul(t10, t18)
    t20 = fd.ops.add(t14, t19)
    t21 = fd.ops.mul(t8, t20)
    t22 = fd.ops.sum(arg=t21, dims=[0], keepdim=True)
    t23 = fd.ops.cast(arg=t21, dtype=DataType.BFloat16)
    fd.add_output(output=t23)
    t24 = fd.ops.cast(arg=t22, dtype=DataType.BFloat16)
    fd.add_output(output=t24)


REGIONS = (
    (forward_0, [((6, 20), (20, 1), torch.bfloat16), ((20,), (1,), torch.bfloat16), ((6, 20), (20, 1), torch.float32)]),
    (backward_0, [((6, 20), (20, 1), torch.bfloat16), ((6, 20), (20, 1), torch.float32), ((6, 20), (20, 1), torch.bfloat16), ((20,), (1,), torch.bfloat16)]),
)
