"""The definitions of bias_dropout_residual, forward and backward; written by write_goldens."""

import torch


def forward_0(fd, DataType):
    t0 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.BFloat16, stride_order=[1, 0])
    t1 = fd.define_tensor(shape=[-1], contiguity=[True], dtype=DataType.BFloat16, stride_order=[0])
    t2 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], stride_order=[1, 0])
    t3 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.BFloat16, stride_order=[1, 0])
    t4 = fd.ops.cast(arg=t0, dtype=DataType.Float)
    t5 = fd.ops.cast(arg=t1, dtype=DataType.Float)
    t6 = fd.ops.cast(arg=t3, dtype=DataType.Float)
    t7 = fd.ops.broadcast(arg=t5, is_broadcast_dim=[True, False])
    t8 = fd.ops.add(t4, t7)
    t9 = fd.ops.mul(t2, 1.3333333333333333)
    t10 = fd.ops.mul(t8, t9)
    t11 = fd.ops.add(t10, t6)
    t12 = fd.ops.cast(arg=t11, dtype=DataType.BFloat16)
    fd.add_output(output=t12)


def backward_0(fd, DataType):
    t0 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], dtype=DataType.BFloat16, stride_order=[1, 0])
    t1 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], stride_order=[1, 0])
    t2 = fd.ops.cast(arg=t0, dtype=DataType.Float)
    t3 = fd.ops.mul(t1, 1.3333333333333333)
    t4 = fd.ops.mul(t2, t3)
    t5 = fd.ops.sum(arg=t4, dims=[0], keepdim=True)
    t6 = fd.ops.cast(arg=t4, dtype=DataType.BFloat16)
    fd.add_output(output=t6)
    t7 = fd.ops.cast(arg=t5, dtype=DataType.BFloat16)
    fd.add_output(output=t7)


REGIONS = (
    (forward_0, [((6, 20), (20, 1), torch.bfloat16), ((20,), (1,), torch.bfloat16), ((6, 20), (20, 1), torch.float32), ((6, 20), (20, 1), torch.bfloat16)]),
    (backward_0, [((6, 20), (20, 1), torch.bfloat16), ((6, 20), (20, 1), torch.float32)]),
)
