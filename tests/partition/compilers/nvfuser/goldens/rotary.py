"""The definitions of rotary, forward and backward; written by write_goldens."""

import torch


def forward_0(fd, DataType):
    t0 = fd.define_tensor(shape=[-1, -1, -1, -1], contiguity=[True, True, True, True], dtype=DataType.BFloat16, stride_order=[3, 2, 1, 0])
    t1 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], stride_order=[1, 0])
    t2 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], stride_order=[1, 0])
    t3 = fd.ops.cast(arg=t0, dtype=DataType.Float)
    s0 = fd.ops.size(arg=t3, dim=0)
    s1 = fd.ops.size(arg=t3, dim=1)
    s2 = fd.ops.size(arg=t3, dim=2)
    t4 = fd.ops.slice(arg=t3, start_indices=[0, 0, 0, 0], end_indices=[s0, s1, s2, 4])
    t5 = fd.ops.slice(arg=t3, start_indices=[0, 0, 0, 4], end_indices=[s0, s1, s2, 8])
    t6 = fd.ops.broadcast(arg=t1, is_broadcast_dim=[True, True, False, False])
    t7 = fd.ops.mul(t4, t6)
    t8 = fd.ops.broadcast(arg=t2, is_broadcast_dim=[True, True, False, False])
    t9 = fd.ops.mul(t5, t8)
    t10 = fd.ops.sub(t7, t9)
    t11 = fd.ops.mul(t5, t6)
    t12 = fd.ops.mul(t4, t8)
    t13 = fd.ops.add(t11, t12)
    t14 = fd.ops.cat(tensors=[t10, t13], dim=3)
    t15 = fd.ops.cast(arg=t14, dtype=DataType.BFloat16)
    fd.add_output(output=t15)


def backward_0(fd, DataType):
    t0 = fd.define_tensor(shape=[-1, -1, -1, -1], contiguity=[True, True, True, True], dtype=DataType.BFloat16, stride_order=[3, 2, 1, 0])
    t1 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], stride_order=[1, 0])
    t2 = fd.define_tensor(shape=[-1, -1], contiguity=[True, True], stride_order=[1, 0])
    t3 = fd.ops.cast(arg=t0, dtype=DataType.Float)
    s0 = fd.ops.size(arg=t3, dim=0)
    s1 = fd.ops.size(arg=t3, dim=1)
    s2 = fd.ops.size(arg=t3, dim=2)
    t4 = fd.ops.slice(arg=t3, start_indices=[0, 0, 0, 0], end_indices=[s0, s1, s2, 4])
    t5 = fd.ops.slice(arg=t3, start_indices=[0, 0, 0, 4], end_indices=[s0, s1, s2, 8])
    t6 = fd.ops.broadcast(arg=t1, is_broadcast_dim=[True, True, False, False])
    t7 = fd.ops.mul(t5, t6)
    t8 = fd.ops.broadcast(arg=t2, is_broadcast_dim=[True, True, False, False])
    t9 = fd.ops.mul(t5, t8)
    t10 = fd.ops.neg(t4)
    t11 = fd.ops.mul(t10, t6)
    t12 = fd.ops.add(t9, t11)
    t13 = fd.ops.mul(t4, t8)
    t14 = fd.ops.add(t7, t13)
    t15 = fd.ops.cat(tensors=[t14, t12], dim=3)
    t16 = fd.ops.cast(arg=t15, dtype=DataType.BFloat16)
    fd.add_output(output=t16)


REGIONS = (
    (forward_0, [((2, 3, 5, 8), (120, 40, 8, 1), torch.bfloat16), ((5, 4), (4, 1), torch.float32), ((5, 4), (4, 1), torch.float32)]),
    (backward_0, [((2, 3, 5, 8), (120, 40, 8, 1), torch.bfloat16), ((5, 4), (4, 1), torch.float32), ((5, 4), (4, 1), torch.float32)]),
)
