import importlib.util
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.partition.compilers.nvfuser.definitions import Build, close, defined, fd_type, floats, run
from tests.partition.compilers.nvfuser.fusion_definition import (
    EXECUTED,
    FusionDefinition,
    StandIn,
    compute_tensor_descriptor,
)
from tests.partition.compilers.nvfuser.signatures import OVERLOADS

X, Y, T = floats(5, 7), floats(5, 7, low=0.2), floats(2, 3, 4)


class TestCalls:
    """What pybind11 refuses."""

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda fd, x: fd.ops.add(x), r"add\(\): incompatible function arguments"),
            (lambda fd, x: fd.ops.add(lhs=x, rhs=x), r"1\. add\(Val \| number, Val \| number\)"),
            (lambda fd, x: fd.ops.add(x, "1"), r"Invoked with: t0, '1'"),
            (lambda fd, x: fd.ops.add(x, None), r"add\(\): incompatible"),
            (lambda fd, x: fd.ops.add(x, torch.ones(2)), r"add\(\): incompatible"),
            (lambda fd, x: fd.ops.add(x, 2**63), r"add\(\): incompatible"),
            (lambda fd, x: fd.ops.cast(x, torch.float32), r"cast\(arg: Val \| number, dtype: DataType\)"),
            (lambda fd, x: fd.ops.sum(x, [0], keep_dim=True), r"3\. sum\(arg: TensorView, dims: Sequence\[int\]"),
            (lambda fd, x: fd.ops.sum(x, 0.0), r"sum\(\): incompatible"),
            (lambda fd, x: fd.ops.broadcast(x, [0, 1]), r"is_broadcast_dim: Sequence\[bool\]"),
            (lambda fd, x: fd.ops.slice(x, [0, 0], (1, 1)), r"2\. slice\(arg: TensorView, start_indices: tuple"),
            (lambda fd, x: fd.ops.reshape(x, 35), r"new_shape: list"),
            (lambda fd, x: fd.ops.uniform(0.0, 1.0, [4], rng_seed=1, rng_offset=0), r"rng_seed: Val \| None = None"),
            (lambda fd, x: fd.ops.uniform(0.0, 1.0, [4], fd_type("Float")), r"uniform\(\): incompatible"),
            (lambda fd, x: fd.define_tensor(), r"define_tensor\(\): incompatible"),
            (
                lambda fd, x: fd.define_tensor([2], [1.0]),
                r"2\. define_tensor\(shape: Sequence\[int\], contiguity: bool",
            ),
            (lambda fd, x: fd.define_tensor([2], True, "float"), r"dtype: DataType = DataType\.Float"),
            (lambda fd, x: fd.define_scalar("1"), r"define_scalar\(\): incompatible"),
            (lambda fd, x: fd.add_output(1.0), r"add_output\(output: Val\)"),
        ],
    )
    def test_arguments_that_no_overload_takes(self, nvfuser_stand_in: StandIn, call: Build, message: str) -> None:
        with pytest.raises(TypeError, match=message), nvfuser_stand_in.FusionDefinition() as fd:
            call(fd, fd.from_pytorch(X))

    def test_an_unknown_operation(self, nvfuser_stand_in: StandIn) -> None:
        with nvfuser_stand_in.FusionDefinition() as fd:
            for name in ("gelu", "softmax", "mean", "any", "argmax", "expand_as"):
                with pytest.raises(AttributeError, match=f"module 'nvfuser_direct.ops' has no attribute '{name}'"):
                    getattr(fd.ops, name)

    def test_one_that_is_not_executed(self, nvfuser_stand_in: StandIn) -> None:
        with nvfuser_stand_in.FusionDefinition() as fd:
            x = fd.from_pytorch(X)
            with pytest.raises(NotImplementedError, match="matmul is in nvfuser_direct, but is not executed by this"):
                fd.ops.matmul(x, x)
            with pytest.raises(TypeError, match=r"matmul\(arg1: TensorView, arg2: TensorView\)"):
                fd.ops.matmul(x)

    def test_which_are_not_executed(self) -> None:
        assert set(OVERLOADS) - set(EXECUTED) == {
            "argsort",
            "cutlass_nvfp4_grouped_mm",
            "embedding_fwd",
            "grouped_mm",
            "linear",
            "matmul",
            "nv_block_quantize",
            "nv_grouped_block_quantize",
            "preprocess_grouped_matmul_input_sf",
            "scaled_mm",
            "scatter",
            "sdpfa_bwd",
            "sdpfa_fwd",
            "topk",
        }


class TestDefinitions:
    """What nvFuser refuses while a fusion is defined."""

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda fd, x: fd.define_tensor([2, -2], True), "The value -2 at index 1 was neither symbolic"),
            (lambda fd, x: fd.define_tensor([2, 3], [True]), r"Length of contiguity argument \(1\) must match"),
            (lambda fd, x: fd.define_tensor([1, 3], [True, True]), "of a broadcast/reduction dimension must be None"),
            (lambda fd, x: fd.define_tensor([2, 3], True, stride_order=[0]), "Length of stride_order argument"),
            (
                lambda fd, x: fd.define_tensor([2, 3], True, stride_order=[0, 0]),
                r"stride_order is not a valid: \[0, 0\]",
            ),
            (lambda fd, x: fd.define_tensor([2], True, is_cpu=True), "CPU non-scalar tensor is not supported!"),
            (lambda fd, x: fd.define_tensor([2] * 9, True), "a tensor has at most 8 dimensions, this one would have 9"),
            (lambda fd, x: fd.define_tensor([2, 3], [3]), "must have the same number of dimensions"),
            (
                lambda fd, x: fd.define_tensor([2, 3], [-3, 1]),
                r"negative stride on tensor is not supported: strides\[0\]",
            ),
            (lambda fd, x: fd.define_scalar(None), "a scalar without a value needs a DataType"),
            (lambda fd, x: fd.add_output(fd.define_scalar(1.0)), "Non-TensorView outputs are not supported"),
            (lambda fd, x: fd.add_output(x, fd.ops.neg(x)), "alias source can only be a fusion input"),
            (lambda fd, x: fd.ops.broadcast(x, [True] * 7 + [False, False]), "at most 8 dimensions"),
            (lambda fd, x: fd.ops.broadcast(x, [True, False]), "number of false entries .* 2 but received 1"),
            (lambda fd, x: fd.ops.broadcast_in_dim(x, [5, 7], [0]), "one of the output's 2 dimensions for each"),
            (
                lambda fd, x: fd.ops.broadcast_in_dim(x, [5, 7], [0, 0]),
                r"nonbroadcast_dim \(0\) is specified more than",
            ),
            (lambda fd, x: fd.ops.expand(x, [7]), "expand needs at least 2 sizes, got 1"),
            (lambda fd, x: fd.ops.expand(fd.define_tensor([2]), [3]), "Invalid expand size, 3, for an axis of size 2"),
            (lambda fd, x: fd.ops.reshape(x, [-1, -1]), "A maximum of one value of -1"),
            (lambda fd, x: fd.ops.reshape(fd.define_tensor([6]), [4]), "Total element counts across view operation"),
            (lambda fd, x: fd.ops.reshape(x, [5.0, 7]), "Unsupported iterable object type for define_vector! Index:0"),
            (lambda fd, x: fd.ops.reshape(x, [-2]), "The value -2 at index 0 was neither symbolic"),
            (lambda fd, x: fd.ops.full([fd.define_scalar(2.0)], 1.0, fd_type("Float")), "a size must be an integer"),
            (lambda fd, x: fd.ops.full([-1], 1.0, fd_type("Float")), "a new tensor needs every size"),
            (lambda fd, x: fd.ops.full([2], x, fd_type("Float")), "full fills with a scalar, got a tensor"),
            (lambda fd, x: fd.ops.permute(x, [0]), "Operator permute expects `dims` argument to have the same length"),
            (lambda fd, x: fd.ops.permute(x, [0, 0]), "permute needs every dimension once"),
            (lambda fd, x: fd.ops.permute(x, [0, 2]), "Tried to access out of boundary index 2. total index: 2"),
            (lambda fd, x: fd.ops.squeeze(x, [0]), "Can not squeeze non-broadcasting dimension"),
            (lambda fd, x: fd.ops.squeeze(x, [2]), "Squeeze dim is outside of Tensor size! Tensor Size: 2 Dim: 2"),
            (
                lambda fd, x: fd.ops.squeeze(fd.ops.broadcast_in_dim(x, [3, 5, 7], [1, 2]), [0]),
                "Refusing to squeeze expanded IterDomain",
            ),
            (lambda fd, x: fd.ops.slice(x, [0], [1]), "Number of tensor dimensions does not match slice dimensions"),
            (lambda fd, x: fd.ops.slice(x, [-1, 0], [5, 7]), "start_indices must be greater than or equal to 0"),
            (
                lambda fd, x: fd.ops.slice(x, [2, 0], [1, 7]),
                "end_indices must be greater than or equal to start_indices",
            ),
            (lambda fd, x: fd.ops.slice(x, [0, 0], [5, 7], [2, 1]), "strides must be of const size 1"),
            (lambda fd, x: fd.ops.slice(x, [0, 0], [5, 7], [1]), "start_indices and strides don't match"),
            (lambda fd, x: fd.ops.slice(x, [0, 0], [5]), "Slice indexing attribute dimensions don't match"),
            (lambda fd, x: fd.ops.pad(x, [1] * 6), "at most twice the input dimension"),
            (lambda fd, x: fd.ops.pad(x, [1]), "Invalid number of padding widths: 1"),
            (lambda fd, x: fd.ops.pad(x, [1, 1], 0), "Tensor arg and pad value must have the same dtype"),
            (lambda fd, x: fd.ops.cat([]), "No input tensor given"),
            (lambda fd, x: fd.ops.cat([x, fd.ops.isnan(x)]), "Can't concatenate tensors with different data types"),
            (lambda fd, x: fd.ops.cat([x, fd.define_tensor([2])]), "Unexpected number of dimensions: 1, expected: 2"),
            (lambda fd, x: fd.ops.cat([x, x], 2), "Invalid dimension to cat: 2"),
            (lambda fd, x: fd.ops.size(x, 2), "Tried to access out of boundary index 2"),
            (lambda fd, x: fd.ops.stride_order(x, [0]), "`stride_order` argument to have the same length as input"),
            (lambda fd, x: fd.ops.stride_order(x, [0, 2]), "stride_order is not a valid"),
            (lambda fd, x: fd.ops.gather(x, x, 0), "an index must be an integer tensor"),
            (lambda fd, x: fd.ops.gather(x, fd.define_tensor([2]), 0), "different dimensions 2 and 1"),
            (lambda fd, x: fd.ops.take_along_axis(x, x, 2), "dim argument must satisfy -2 <= dim < 2, but received 2"),
            (lambda fd, x: fd.ops.index_select(x, x, 0), "index_tv must be a 1d or scalar tensor"),
            (lambda fd, x: fd.ops.triu(fd.define_tensor([2])), "triu must have 2 or more dims, but got 1 dims"),
            (lambda fd, x: fd.ops.iota(2.0), "length must be integer"),
            (lambda fd, x: fd.ops.iota(2, 0, dtype=fd_type("Float")), "iota: start dtype does not match"),
            (lambda fd, x: fd.ops.iota(2, 0, 0), "iota: step value must not equal zero"),
            (lambda fd, x: fd.ops.sum(x, []), "No reduction axis specified"),
            (lambda fd, x: fd.ops.sum(x, [0, -2]), "a reduction names an axis once"),
            (lambda fd, x: fd.ops.max(x, 0, dtype=fd_type("Double")), "A dtype other than Null is not currently"),
            (lambda fd, x: fd.ops.var_mean(x, [0], -1), "correction must be non-negative, but got -1"),
            (
                lambda fd, x: fd.ops.var_mean(fd.ops.cast(x, fd_type("BFloat16")), [0]),
                "variance_mean is not supported for DataType.BFloat16 please upcast to float",
            ),
            (lambda fd, x: fd.ops.welford(fd.define_tensor([]), [0]), "Tried to reduce a 0-dim tensor"),
            (lambda fd, x: fd.ops.where(x, x, x), "Condition should be of DataType Bool, not DataType.Float"),
            (lambda fd, x: fd.ops.clamp(x, x, 1.0), "For Clamp operation: Min and Max values should be Scalars"),
            (lambda fd, x: fd.ops.threshold(x, 0.0, x), "Thresh and Value values should be Scalars"),
            (lambda fd, x: fd.ops.threshold(x, None, 0.0), "threshold needs a threshold and a value"),
            (lambda fd, x: fd.ops.addcmul(x, x, x, x), "Alpha value should be a Scalar"),
            (lambda fd, x: fd.ops.bitwise_and(x, 1), "Integer or boolean input is required for bitwise_and"),
            (lambda fd, x: fd.ops.bitwise_not(x), "input must have integral or boolean type"),
            (lambda fd, x: fd.ops.bitwise_left_shift(fd.ops.isnan(x), 1), "input must have integral type"),
            (lambda fd, x: fd.ops.mod(x, 2.0), "mod is not compiled for DataType.Float"),
            (
                lambda fd, x: fd.ops.nextafter(h := fd.ops.cast(x, fd_type("Half")), h),
                "must be single or double precision float but found DataType.Half",
            ),
            (lambda fd, x: fd.ops.imag(x), "imag not supported for non-complex tensors"),
            (lambda fd, x: fd.ops.complex(x, fd.ops.isnan(x)), "real and imag data type should be same"),
            (lambda fd, x: fd.ops.complex(i := fd.ops.isnan(x), i), "Only support Float and Double"),
            (lambda fd, x: fd.ops.cast(x, fd_type("Null")), "Illegal Cast value from DataType: DataType.Float"),
            (lambda fd, x: fd.ops.rand_like(fd.ops.isnan(x)), "input must have floating point type"),
            (lambda fd, x: fd.ops.rand_like(1.0), "random numbers are drawn like a tensor, got a scalar"),
            (
                lambda fd, x: fd.ops.uniform(0.0, 1.0, [4], rng_seed=fd.define_scalar(1)),
                "rng_seed and rng_offset must be provided together!",
            ),
            (
                lambda fd, x: fd.ops.uniform(0.0, 1.0, [4], dtype=fd_type("Int")),
                "Random distributions only create floating point types!",
            ),
            (
                lambda fd, x: fd.ops.add(fd.define_tensor([3]), fd.define_tensor([4])),
                "Expected sizes to match: 3 vs 4",
            ),
        ],
    )
    def test_a_wrong_one(self, nvfuser_stand_in: StandIn, call: Build, message: str) -> None:
        with pytest.raises(RuntimeError, match=message), nvfuser_stand_in.FusionDefinition() as fd:
            call(fd, fd.from_pytorch(X))
        assert not nvfuser_stand_in.defined

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda fd, x: fd.define_tensor([2], dtype=fd_type("Float8_e5m2")), "an input of DataType.Float8_e5m2"),
            (lambda fd, x: fd.ops.cast(x, fd_type("UInt64")), "DataType.UInt64 is not executed by this stand-in"),
            (lambda fd, x: fd.ops.cat([x, x], 0, True), "cat with manual_padding=True is not executed"),
            (lambda fd, x: fd.ops.cumsum(x, 0, fd.define_scalar(1.0)), "a scan from an initial value is not executed"),
        ],
    )
    def test_what_is_not_executed(self, nvfuser_stand_in: StandIn, call: Build, message: str) -> None:
        with pytest.raises(NotImplementedError, match=message), nvfuser_stand_in.FusionDefinition() as fd:
            call(fd, fd.from_pytorch(X))

    def test_a_value_of_another_definition(self, nvfuser_stand_in: StandIn) -> None:
        with nvfuser_stand_in.FusionDefinition() as first:
            x = first.from_pytorch(X)
        with nvfuser_stand_in.FusionDefinition() as second:
            for call in (
                lambda: second.ops.neg(x),
                lambda: second.ops.cat([x]),
                lambda: second.add_output(x),
            ):
                with pytest.raises(RuntimeError, match="it was not found in the active container"):
                    call()
            with pytest.raises(RuntimeError, match="another FusionDefinition is being defined"):
                first.define_tensor([2])

    def test_outside_of_the_with(self, nvfuser_stand_in: StandIn) -> None:
        fd = nvfuser_stand_in.FusionDefinition()
        with pytest.raises(RuntimeError, match="Need an active container to build IR"):
            fd.define_tensor([2])
        with fd:
            x = fd.from_pytorch(X)
            fd.add_output(fd.ops.neg(x))
        for call in (lambda: fd.ops.neg(x), lambda: x.size(0), lambda: fd.add_output(x), lambda: fd.define_scalar(1)):
            with pytest.raises(RuntimeError, match="Need an active container to build IR"):
                call()
        with pytest.raises(RuntimeError, match="this FusionDefinition was defined already"), fd:
            pass

    def test_a_tensor_on_another_device(self, nvfuser_stand_in: StandIn) -> None:
        nvfuser_stand_in.pretends_cuda = False
        with (
            nvfuser_stand_in.FusionDefinition() as fd,
            pytest.raises(ValueError, match="only scalar CPU or CUDA tensors are supported"),
        ):
            fd.from_pytorch(X)


class TestInputs:
    """What nvFuser refuses when a fusion is executed."""

    def negated(self, stand_in: StandIn, *args: Any, **kwargs: Any) -> FusionDefinition:
        with stand_in.FusionDefinition() as fd:
            fd.add_output(fd.ops.neg(fd.define_tensor(*args, **kwargs)))
        return fd

    def test_nothing_defined(self, nvfuser_stand_in: StandIn) -> None:
        with pytest.raises(NotImplementedError, match="Fusion does not exist!"):
            nvfuser_stand_in.FusionDefinition().execute([])
        with nvfuser_stand_in.FusionDefinition() as fd:
            fd.from_pytorch(X)
        with pytest.raises(NotImplementedError, match="Fusion is empty!"):
            fd.execute([X])

    def test_inside_of_the_with(self, nvfuser_stand_in: StandIn) -> None:
        with nvfuser_stand_in.FusionDefinition() as fd:
            fd.add_output(fd.from_pytorch(X))
            with pytest.raises(RuntimeError, match="executed after its definition, outside of the with"):
                fd.execute([X])

    @pytest.mark.parametrize(
        ("inputs", "message"),
        [
            ([], "1 inputs, got 0: KernelArgumentHolder contains less argument than kernel's input"),
            ([X, X], "the fusion has 1 inputs, got 2"),
            ([1.0], "Expected input 0, t0, to be an at::Tensor but got scalar 1.0"),
            ([X[0]], "to be bound to a tensor of rank 2, but got a tensor of rank 1"),
            ([X.double()], "to be bound to a tensor of dtype DataType.Float, but got a tensor of dtype torch.float64"),
            ([X[:, :6]], "Tried to bind to a constant value: 7 as 6"),
            ([X.t().contiguous().t()], "stride mismatch with contiguity info"),
            ([torch.empty(5, 14)[:, ::2]], "stride mismatch with contiguity info"),
        ],
    )
    def test_another_tensor_than_was_defined(self, nvfuser_stand_in: StandIn, inputs: list[Any], message: str) -> None:
        fd = self.negated(nvfuser_stand_in, [-1, 7], [True, True])
        with pytest.raises(RuntimeError, match=message):
            fd.execute(inputs)
        assert fd.executions == 0

    def test_another_scalar_than_was_defined(self, nvfuser_stand_in: StandIn) -> None:
        fd = defined(nvfuser_stand_in, lambda fd, x, s: fd.ops.mul(x, s), X, 2.0)
        with pytest.raises(RuntimeError, match="to be a scalar but got a tensor"):
            fd.execute([X, torch.tensor(2.0)])
        for number in (2, True, 1j):
            with pytest.raises(RuntimeError, match="is not compatible with the expected data type"):
                fd.execute([X, number])
        with pytest.raises(RuntimeError, match="Cannot convert provided py::handle to a PolymorphicValue"):
            fd.execute([X, "2"])

    def test_a_list_of_numbers_is_a_vector(self, nvfuser_stand_in: StandIn) -> None:
        with nvfuser_stand_in.FusionDefinition() as fd:
            fd.add_output(fd.ops.full(fd.define_vector(2), 1.0, fd_type("Float")))
        close(fd.execute([[2, 3]])[0], torch.ones(2, 3))

    def test_a_size_of_1_is_said_at_definition(self, nvfuser_stand_in: StandIn) -> None:
        with nvfuser_stand_in.FusionDefinition() as fd:
            x = fd.define_tensor([-1, -1], [True, True])
            fd.add_output(fd.ops.add(x, fd.define_tensor([1, 7], [None, True])))
        close(fd.execute([X, X[:1]])[0], X + X[:1])
        with pytest.raises(RuntimeError, match="Tried to bind to a constant value: 1 as 5"):
            fd.execute([X, X])

    @pytest.mark.parametrize(
        "build",
        [
            lambda fd, x, y: fd.ops.add(x, y),
            lambda fd, x, y: fd.ops.where(fd.ops.isnan(x), x, y),
            lambda fd, x, y: fd.ops.add(x, fd.ops.expand(y, x.shape())),
            lambda fd, x, y: fd.ops.broadcast_in_dim(y, [5, 7], [0, 1]),
        ],
    )
    def test_a_size_that_was_not_said_to_be_1_is_not_broadcast(self, nvfuser_stand_in: StandIn, build: Build) -> None:
        with nvfuser_stand_in.FusionDefinition() as fd:
            fd.add_output(build(fd, *(fd.define_tensor([-1, -1], [True, True]) for _ in range(2))))
        fd.execute([X, X])
        with pytest.raises(RuntimeError, match="A size that was not 1 when the fusion was defined is never broadcast"):
            fd.execute([X, X[:1]])

    def test_a_size_that_a_reshape_left_is_broadcast(self, nvfuser_stand_in: StandIn) -> None:
        made = run(nvfuser_stand_in, lambda fd, x, y, n: fd.ops.add(x, fd.ops.reshape(y, [n, -1])), X, X[0], 1)
        close(made, X + X[0])

    def test_a_reshape_or_slice_that_does_not_fit(self, nvfuser_stand_in: StandIn) -> None:
        fd = defined(nvfuser_stand_in, lambda fd, x, n: fd.ops.reshape(x, [n, 7]), X, 5)
        with pytest.raises(RuntimeError, match=r"Total element counts .* must match: \[5, 7\] to \[4, 7\]"):
            fd.execute([X, 4])
        fd = defined(nvfuser_stand_in, lambda fd, x: fd.ops.slice(x, [0], [6], None, True), torch.ones(6))
        with pytest.raises(RuntimeError, match="manual_normalization promises 0 <= start <= end <= size, got 0, 6, 5"):
            fd.execute([torch.ones(5)])
        fd = defined(nvfuser_stand_in, lambda fd, x, n: fd.ops.squeeze(fd.ops.reshape(x, [n, -1]), [0]), X, 1)
        with pytest.raises(RuntimeError, match="with size != 1, dimension 0 has size 5"):
            fd.execute([X, 5])

    def test_tensors_that_do_not_fit_beside_each_other(self, nvfuser_stand_in: StandIn) -> None:
        fd = defined(nvfuser_stand_in, lambda fd, x, y: fd.ops.cat([x, y], 1), X, Y)
        with pytest.raises(RuntimeError, match="Sizes of tensors must match except in dimension 1"):
            fd.execute([X, Y[:4]])
        fd = defined(nvfuser_stand_in, lambda fd, x, i: fd.ops.take_along_axis(x, i, 1), X, torch.zeros(5, 2).long())
        with pytest.raises(RuntimeError, match="Expected sizes to match: 5 vs 4 in dimension 0"):
            fd.execute([X, torch.zeros(4, 2).long()])

    def test_an_expanded_input_is_said_at_definition(self, nvfuser_stand_in: StandIn) -> None:
        fd = self.negated(nvfuser_stand_in, [-1, -1], [None, True])
        close(fd.execute([X[:1].expand(5, 7)])[0], -X[:1].expand(5, 7))
        with pytest.raises(RuntimeError, match="has expanded extent but input tensor has size 5 and stride 7"):
            fd.execute([X])

    def test_a_stride_order_counts_from_the_fastest(self, nvfuser_stand_in: StandIn) -> None:
        fd = self.negated(nvfuser_stand_in, [-1, -1, -1], [True, True, True], stride_order=[2, 0, 1])
        x = T.transpose(1, 2).contiguous().transpose(1, 2)
        close(fd.execute([x])[0], -x)
        with pytest.raises(RuntimeError, match="stride mismatch with contiguity info"):
            fd.execute([T])

    def test_contiguity_goes_from_the_slowest(self, nvfuser_stand_in: StandIn) -> None:
        rows = torch.zeros(5, 10)[:, :7]
        fd = self.negated(nvfuser_stand_in, [-1, -1], [False, True], stride_order=[0, 1])
        close(fd.execute([rows.t()])[0], -rows.t())
        fd = self.negated(nvfuser_stand_in, [-1, -1], [True, True], stride_order=[0, 1])
        with pytest.raises(RuntimeError, match="stride mismatch with contiguity info"):
            fd.execute([rows.t()])

    def test_a_tensor_without_dimensions_on_the_cpu(self, nvfuser_stand_in: StandIn) -> None:
        scalar = torch.tensor(2.0)
        close(run(nvfuser_stand_in, lambda fd, x, y: fd.ops.mul(x, y), X, scalar), X * 2.0)
        with pytest.raises(RuntimeError, match="bound to a CUDA or meta tensor, but got a tensor on device cpu"):
            self.negated(nvfuser_stand_in, [], []).execute([scalar])

    def test_an_output_of_scalars_on_the_cpu_alone(self, nvfuser_stand_in: StandIn) -> None:
        scalar = torch.tensor(2.0)
        fd = self.negated(nvfuser_stand_in, [], is_cpu=True)
        with pytest.raises(RuntimeError, match="KernelExecutor does not support the Fusion provided"):
            fd.execute([scalar])
        assert run(nvfuser_stand_in, lambda fd, x: x, scalar) is scalar
        filled = run(nvfuser_stand_in, lambda fd, x: fd.ops.mul(fd.ops.full([2], 3.0, fd_type("Float")), x), scalar)
        close(filled, torch.full((2,), 6.0))

    def test_the_cpu_when_nothing_is_pretended(self, nvfuser_stand_in: StandIn) -> None:
        fd = self.negated(nvfuser_stand_in, [-1, -1])
        nvfuser_stand_in.pretends_cuda = False
        with pytest.raises(RuntimeError, match="bound to a CUDA or meta tensor, but got a tensor on device cpu"):
            fd.execute([X])

    def test_options_and_devices(self, nvfuser_stand_in: StandIn) -> None:
        fd = self.negated(nvfuser_stand_in, [-1, -1])
        fd.execute([X], device="cuda:0")
        with pytest.raises(AssertionError, match="If device argument is passed it must be a CUDA device"):
            fd.execute([X], device="cpu")
        with pytest.raises(NotImplementedError, match="options are not executed by this stand-in"):
            fd.execute([X], _enable_options=["fuse_matmul"])


class TestDescriptors:
    def test_a_broadcast_axis_among_permuted_ones(self, nvfuser_stand_in: StandIn) -> None:
        # nvFuser's own example: dimension 1 is the slowest and was expanded.
        with nvfuser_stand_in.FusionDefinition() as fd:
            x = fd.define_tensor(shape=[-1, 16, 3], contiguity=[None, True, True], stride_order=[1, 2, 0])
            fd.add_output(fd.ops.mul(x, 3.0))
        strided = floats(6).as_strided((2, 16, 3), (3, 0, 1))
        close(fd.execute([strided])[0], strided * 3.0)
        with pytest.raises(RuntimeError, match="has expanded extent but input tensor has size 16 and stride 3"):
            fd.execute([floats(2, 16, 3)])

    @pytest.mark.parametrize(
        ("tensor", "contiguity", "stride_order"),
        [
            (torch.empty(2, 3, 4), [True, True, True], [2, 1, 0]),
            (torch.empty(2, 4, 3).transpose(1, 2), [True, True, True], [2, 0, 1]),
            (torch.empty(1, 2, 3), [None, True, True], [2, 1, 0]),
            (torch.empty(2, 6)[:, :3], [False, True], [1, 0]),
            (torch.empty(2, 6)[:, ::2], [True, False], [1, 0]),
            (torch.empty(3).expand(4, 3), [None, True], [1, 0]),
            (torch.empty(3, 1).expand(3, 4), [True, None], [1, 0]),
            (
                torch.empty(4800).as_strided((5, 4, 1, 5, 16), (960, 48, 16, 192, 1)),
                [True, True, False, None, True],
                [4, 2, 1, 3, 0],
            ),
            (torch.empty(()), [], []),
        ],
    )
    def test_of(self, tensor: Tensor, contiguity: list[bool | None], stride_order: list[int]) -> None:
        assert compute_tensor_descriptor(tensor.shape, tensor.stride()) == (contiguity, stride_order)

    def test_they_fit_their_tensor(self, nvfuser_stand_in: StandIn) -> None:
        for x in (T, T.permute(2, 0, 1), T[:, ::2], T[..., :1], T[:, :1].expand(2, 3, 4), T[:0]):
            close(run(nvfuser_stand_in, lambda fd, x: fd.ops.neg(x), x), -x)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda fd, x: fd.ops.mul(fd.ops.cast(x, fd_type("Half")), 1j), "Only support Float and Double"),
        (lambda fd, x: fd.ops.logical_and(x, 1j), "a complex number is no bool"),
        (lambda fd, x: fd.ops.lerp(0.0, 1.0, x), r"lerp\(\) of two scalars is a scalar"),
        (lambda fd, x: fd.ops.complex(fd.ops.sum(x, [0, 1]), x), r"complex\(\) has the rank of its first operand"),
    ],
    ids=["half and complex", "logical", "lerp", "complex"],
)
def test_corners_that_the_real_one_refuses(build: Any, message: str, nvfuser_stand_in: StandIn) -> None:
    with pytest.raises(RuntimeError, match=message):
        defined(nvfuser_stand_in, build, X)


class TestScripts:
    def test_a_line_for_each_call(self, nvfuser_stand_in: StandIn) -> None:
        def build(fd: FusionDefinition, x: Any, s: Any) -> Any:
            variance, mean = fd.ops.var_mean(x, (1,), correction=0, keepdim=True)
            (rows, _) = x.shape()
            masked = fd.ops.where(fd.ops.gt(x, s), fd.ops.sub(x, mean), -math.inf)
            return fd.ops.add(masked, variance), fd.ops.broadcast_in_dim(fd.ops.sum(x, 0), [rows, 7], [1])

        fd = defined(nvfuser_stand_in, build, X, 0.5)
        assert fd.script().splitlines() == [
            "t0 = fd.define_tensor(sizes=(5, 7), strides=(7, 1))",
            "s0 = fd.define_scalar()",
            "t1, t2 = fd.ops.var_mean(arg=t0, dims=(1,), correction=0, keepdim=True)",
            "s1, s2 = fd.ops.shape(t0)",
            "t3 = fd.ops.gt(t0, s0)",
            "t4 = fd.ops.sub(t0, t2)",
            't5 = fd.ops.where(t3, t4, float("-inf"))',
            "t6 = fd.ops.add(t5, t1)",
            "t7 = fd.ops.sum(arg=t0, dim=0)",
            "t8 = fd.ops.broadcast_in_dim(arg=t7, shape=[s1, 7], broadcast_dims=[1])",
            "fd.add_output(output=t6)",
            "fd.add_output(output=t8)",
        ]
        assert repr(fd) == fd.script()

    def test_a_definition_that_calls_nothing_twice_is_written_the_same_again(self, nvfuser_stand_in: StandIn) -> None:
        build = lambda fd, x: fd.ops.full([x.size(0)], math.nan, fd_type("Half"))  # noqa: E731
        assert defined(nvfuser_stand_in, build, X).script() == defined(nvfuser_stand_in, build, X).script()


class TestTheModule:
    def test_is_imported_by_its_name(self, nvfuser_stand_in: StandIn) -> None:
        import nvfuser_direct
        from nvfuser_direct.pytorch_utils import torch_dtype_to_nvfuser_dtype

        assert nvfuser_direct is nvfuser_stand_in
        assert nvfuser_direct.version() == nvfuser_direct.__version__ == "0.2.36"
        assert torch_dtype_to_nvfuser_dtype(torch.int32) is nvfuser_direct.DataType.Int32
        with pytest.raises(KeyError):
            torch_dtype_to_nvfuser_dtype(torch.int8)

    def test_is_found_as_a_package(self, nvfuser_stand_in: StandIn) -> None:
        assert importlib.util.find_spec("nvfuser_direct") is nvfuser_stand_in.__spec__

    def test_counts_definitions_and_executions(self, nvfuser_stand_in: StandIn) -> None:
        first = defined(nvfuser_stand_in, lambda fd, x: fd.ops.neg(x), X)
        second = defined(nvfuser_stand_in, lambda fd, x: fd.ops.exp(x), X)
        first.execute([X])
        first.execute([Y])
        second.execute([X])
        assert nvfuser_stand_in.defined == [first, second]
        assert (first.executions, second.executions, nvfuser_stand_in.executions) == (2, 1, 3)
