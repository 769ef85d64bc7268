import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.partition.compilers.nvfuser.definitions import Build, bools, close, defined, fd_type, floats, integers, run
from tests.partition.compilers.nvfuser.fusion_definition import EXECUTED, FusionDefinition, StandIn

# X, Y: floats, Y positive; N, M: integers, M positive; P, Q: bools; T has three dimensions.
SPECIAL = torch.tensor([-math.inf, -2.5, -1.5, -0.0, 0.0, 0.5, 1.5, 2.5, math.inf, math.nan])
X, Y = floats(5, 7), floats(5, 7, low=0.2)
NEAR, ABOVE = floats(5, 7, low=-0.9, high=0.9), floats(5, 7, low=1.1, high=3.0)
N, M = integers(5, 7), integers(5, 7, low=1)
P, Q = bools(5, 7), bools(7)
T = floats(2, 3, 4)

UNARY: dict[str, tuple[Callable[..., Tensor], Sequence[Tensor]]] = {
    "abs": (torch.abs, [X, N, SPECIAL]),
    "acos": (torch.acos, [NEAR]),
    "acosh": (torch.acosh, [ABOVE]),
    "asin": (torch.asin, [NEAR]),
    "asinh": (torch.asinh, [X]),
    "atan": (torch.atan, [X, N]),
    "atanh": (torch.atanh, [NEAR]),
    "bitwise_not": (torch.bitwise_not, [N, P]),
    "ceil": (torch.ceil, [X, SPECIAL]),
    "cos": (torch.cos, [X]),
    "cosh": (torch.cosh, [X]),
    "erf": (torch.erf, [X]),
    "erfc": (torch.erfc, [X]),
    "erfcinv": (lambda x: torch.erfinv(1 - x), [NEAR.abs()]),
    "erfinv": (torch.erfinv, [NEAR]),
    "exp": (torch.exp, [X, N, P]),
    "exp2": (torch.exp2, [X]),
    "expm1": (torch.expm1, [X]),
    "floor": (torch.floor, [X, SPECIAL]),
    "frac": (torch.frac, [X]),
    "imag": (torch.imag, [torch.complex(X, Y)]),
    "isfinite": (torch.isfinite, [SPECIAL]),
    "isinf": (torch.isinf, [SPECIAL]),
    "isnan": (torch.isnan, [SPECIAL]),
    "isneginf": (torch.isneginf, [SPECIAL]),
    "isposinf": (torch.isposinf, [SPECIAL]),
    "isreal": (torch.isreal, [X]),
    "lgamma": (torch.lgamma, [Y]),
    "log": (torch.log, [Y]),
    "log10": (torch.log10, [Y]),
    "log1p": (torch.log1p, [Y]),
    "log2": (torch.log2, [Y]),
    "logical_not": (torch.logical_not, [P, N]),
    "neg": (torch.neg, [X, N]),
    "real": (torch.real, [torch.complex(X, Y)]),
    "reciprocal": (torch.reciprocal, [Y, M]),
    "relu": (torch.relu, [X, N, SPECIAL]),
    "round": (torch.round, [X, SPECIAL]),
    "rsqrt": (torch.rsqrt, [Y]),
    "segment_set": (torch.clone, [X]),
    "set": (torch.clone, [X, N, P]),
    "sigmoid": (torch.sigmoid, [X]),
    "sign": (torch.sign, [X, N]),
    "signbit": (torch.signbit, [X, SPECIAL]),
    "silu": (torch.nn.functional.silu, [X]),
    "sin": (torch.sin, [X]),
    "sinh": (torch.sinh, [X]),
    "sqrt": (torch.sqrt, [Y]),
    "tan": (torch.tan, [NEAR]),
    "tanh": (torch.tanh, [X]),
    "trunc": (torch.trunc, [X, SPECIAL]),
}
SHIFTS = integers(5, 7, low=0, high=8)
BINARY: dict[str, tuple[Callable[..., Tensor], Sequence[tuple[Tensor, Tensor]]]] = {
    "add": (torch.add, [(X, Y), (N, M), (X, N), (P, P), (N.int(), M)]),
    "atan2": (torch.atan2, [(X, Y)]),
    "bitwise_and": (torch.bitwise_and, [(N, M), (P, ~P), (N, P)]),
    "bitwise_left_shift": (torch.bitwise_left_shift, [(N, SHIFTS)]),
    "bitwise_or": (torch.bitwise_or, [(N, M), (P, ~P)]),
    "bitwise_right_shift": (torch.bitwise_right_shift, [(N, SHIFTS)]),
    "bitwise_xor": (torch.bitwise_xor, [(N, M), (P, Q.expand(5, 7))]),
    "complex": (torch.complex, [(X, Y)]),
    "div": (lambda x, y: x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc"), [(X, Y), (N, M)]),
    "eq": (torch.eq, [(N, M), (P, ~P)]),
    "fmod": (torch.fmod, [(X, Y), (N, M)]),
    "gcd": (torch.gcd, [(N, M)]),
    "ge": (torch.ge, [(X, Y), (X, N)]),
    "gt": (torch.gt, [(X, Y)]),
    "le": (torch.le, [(X, Y)]),
    "logical_and": (torch.logical_and, [(P, ~P), (N, P)]),
    "logical_or": (torch.logical_or, [(P, ~P), (X, P)]),
    "logical_right_shift": (
        lambda x, y: torch.where(y == 0, x, (x >> y) & ((1 << (64 - y.clamp(min=1))) - 1)),
        [(N, SHIFTS)],
    ),
    "lt": (torch.lt, [(X, Y)]),
    "maximum": (torch.maximum, [(X, Y), (SPECIAL, SPECIAL.flip(0)), (N, M)]),
    "minimum": (torch.minimum, [(X, Y), (SPECIAL, SPECIAL.flip(0)), (N, M)]),
    "mod": (torch.fmod, [(N, M)]),
    "mul": (torch.mul, [(X, Y), (N, M), (P, ~P), (X, P)]),
    "ne": (torch.ne, [(N, M)]),
    "nextafter": (torch.nextafter, [(X, Y)]),
    "pow": (torch.pow, [(Y, X), (N, SHIFTS), (Y, N)]),
    "remainder": (torch.remainder, [(X, Y), (X, -Y), (N, M), (N, -M)]),
    "sub": (torch.sub, [(X, Y), (N, M)]),
    "truediv": (torch.true_divide, [(X, Y), (N, M), (P, M)]),
}


# An operation by its name: what is defined of the inputs, what torch makes of them, and the inputs.
OTHERS: dict[str, Sequence[tuple[Build, Callable[..., Any], Sequence[Any]]]] = {
    "addcmul": [(lambda fd, x, y, z: fd.ops.addcmul(x, y, z, 0.5), lambda x, y, z: x + 0.5 * y * z, (X, Y, NEAR))],
    "broadcast": [
        (lambda fd, x: fd.ops.broadcast(x, [True, False, True, False]), lambda x: x[None, :, None, :], (X,)),
        (lambda fd, x: fd.ops.broadcast(x, [False, False]), lambda x: x, (X,)),
    ],
    "broadcast_in_dim": [
        (lambda fd, x: fd.ops.broadcast_in_dim(x, [3, 5, 2, 7], [1, 3]), lambda x: x[:, None].expand(3, 5, 2, 7), (X,)),
        (
            lambda fd, x, y: fd.ops.broadcast_in_dim(x, tuple(y.shape()), (1,)),
            lambda x, y: x.expand(5, 7),
            (floats(7), Y),
        ),
    ],
    "cast": [
        (lambda fd, x: fd.ops.cast(x, fd_type("Int")), lambda x: x.long(), (X,)),
        (lambda fd, x: fd.ops.cast(x, fd_type("BFloat16")), lambda x: x.bfloat16(), (X,)),
        (lambda fd, x: fd.ops.cast(x, fd_type("Bool")), lambda x: x.bool(), (N,)),
        (lambda fd, x: fd.ops.cast(x, fd_type("Double")), lambda x: x.double(), (P,)),
    ],
    "cat": [
        (lambda fd, x, y: fd.ops.cat([x, y], 1), lambda x, y: torch.cat([x, y], 1), (X, floats(5, 2))),
        (lambda fd, x, y: fd.ops.cat([x, y], dim=-2), lambda x, y: torch.cat([x, y]), (X, floats(1, 7))),
        (lambda fd, x: fd.ops.cat([x]), lambda x: x, (X,)),
    ],
    "clamp": [
        (lambda fd, x: fd.ops.clamp(x, -0.5, 0.5), lambda x: x.clamp(-0.5, 0.5), (X,)),
        (lambda fd, x: fd.ops.clamp(x, None, 1.0), lambda x: x.clamp(max=1.0), (SPECIAL,)),
        (lambda fd, x: fd.ops.clamp(x, -3, 3), lambda x: x.clamp(-3, 3), (N,)),
    ],
    "cummax": [(lambda fd, x: fd.ops.cummax(x, 1), lambda x: x.cummax(1).values, (X,))],
    "cummin": [(lambda fd, x: fd.ops.cummin(x, 0), lambda x: x.cummin(0).values, (X,))],
    "cumprod": [(lambda fd, x: fd.ops.cumprod(x, 1), lambda x: x.cumprod(1), (X,))],
    "cumsum": [(lambda fd, x: fd.ops.cumsum(x, -1), lambda x: x.cumsum(-1), (X,))],
    "expand": [
        (lambda fd, x: fd.ops.expand(x, [5, 7]), lambda x: x.expand(5, 7), (floats(1, 7),)),
        (lambda fd, x: fd.ops.expand(x, (3, -1, -1)), lambda x: x.expand(3, 5, 7), (X,)),
    ],
    "full": [
        (lambda fd: fd.ops.full([2, 3], 1.5, fd_type("Float")), lambda: torch.full((2, 3), 1.5), ()),
        (lambda fd, x: fd.ops.full(x.shape(), 3, fd_type("Int")), lambda x: torch.full(x.shape, 3), (X,)),
    ],
    "gather": [
        (lambda fd, x, i: fd.ops.gather(x, i, 1), lambda x, i: x.gather(1, i), (X, integers(4, 3, low=0, high=7)))
    ],
    "index_select": [
        (
            lambda fd, x, i: fd.ops.index_select(x, i, 1),
            lambda x, i: x.index_select(1, i),
            (X, integers(4, low=0, high=7)),
        )
    ],
    "iota": [
        (lambda fd: fd.ops.iota(5), lambda: torch.arange(5), ()),
        (lambda fd, n: fd.ops.iota(n, 3, 2), lambda n: torch.arange(3, 3 + 2 * n, 2), (4,)),
        (lambda fd: fd.ops.iota(4, 0.5, 0.25, fd_type("Float")), lambda: torch.arange(4) * 0.25 + 0.5, ()),
    ],
    "lerp": [
        (lambda fd, x, y: fd.ops.lerp(x, y, 0.25), lambda x, y: torch.lerp(x, y, 0.25), (X, Y)),
        (lambda fd, x, y, w: fd.ops.lerp(x, y, w), torch.lerp, (X, Y, NEAR)),
    ],
    "max": [
        (lambda fd, x: fd.ops.max(x), lambda x: x.amax(), (X,)),
        (lambda fd, x: fd.ops.max(x, 1, True), lambda x: x.amax(1, keepdim=True), (N,)),
        (lambda fd, x: fd.ops.max(x, dims=[0, 2]), lambda x: x.amax((0, 2)), (T,)),
        (lambda fd, x: fd.ops.max(x, 0), lambda x: x.any(0), (P,)),
        (lambda fd, x: fd.ops.max(x, 1), lambda x: torch.full((3,), -math.inf), (floats(3, 0),)),
        (lambda fd, x: fd.ops.max(x, 1), lambda x: torch.full((3,), -(2**63)), (integers(3, 0),)),
        (lambda fd, x: fd.ops.max(x, 1), lambda x: torch.full((3,), False), (bools(3, 0),)),
    ],
    "min": [
        (lambda fd, x: fd.ops.min(x, dim=1), lambda x: x.amin(1), (X,)),
        (lambda fd, x: fd.ops.min(x, 0), lambda x: x.all(0), (P,)),
    ],
    "normal": [
        (
            lambda fd: fd.ops.mul(fd.ops.normal(1.0, 2.0, [4, 3]), 0.0),
            lambda: torch.zeros(4, 3),
            (),
        )
    ],
    "pad": [
        (
            lambda fd, x: fd.ops.pad(x, [1, 2], 3.0),
            lambda x: torch.nn.functional.pad(x, (1, 2), value=3.0),
            (X,),
        ),
        (lambda fd, x: fd.ops.pad(x, (0, 0, 2, 1)), lambda x: torch.nn.functional.pad(x, (0, 0, 2, 1)), (N,)),
    ],
    "permute": [(lambda fd, x: fd.ops.permute(x, [2, 0, -2]), lambda x: x.permute(2, 0, 1), (T,))],
    "prod": [
        (lambda fd, x: fd.ops.prod(x, [0]), lambda x: x.prod(0), (X,)),
        (lambda fd, x: fd.ops.prod(x), lambda x: x.prod(), (M[:2],)),
    ],
    "rand_like": [(lambda fd, x: fd.ops.mul(fd.ops.rand_like(x), 0.0), torch.zeros_like, (X,))],
    "randn_like": [(lambda fd, x: fd.ops.mul(fd.ops.randn_like(x), 0.0), torch.zeros_like, (X,))],
    "reshape": [
        (lambda fd, x: fd.ops.reshape(x, [7, 5]), lambda x: x.reshape(7, 5), (X,)),
        (lambda fd, x: fd.ops.reshape(x, (2, -1)), lambda x: x.reshape(2, -1), (T,)),
        (lambda fd, x: fd.ops.reshape(x, [x.size(0), -1]), lambda x: x.flatten(1), (T,)),
        (lambda fd, x: fd.ops.reshape(x, [fd.ops.mul(x.size(0), x.size(1)), 4]), lambda x: x.flatten(0, 1), (T,)),
        (lambda fd, x, n: fd.ops.reshape(x, [fd.ops.add(x.size(0), n), 4]), lambda x, n: x.flatten(0, 1), (T, 4)),
    ],
    "select": [(lambda fd, x, n: fd.ops.select(x, n, 1), lambda x, n: x.select(1, n), (X, 2))],
    "shape": [
        (lambda fd, x: fd.ops.full(fd.ops.shape(x), 0.0, fd_type("Float")), torch.zeros_like, (T,)),
        (lambda fd, x: fd.ops.full(fd.ops.shape(x), 0.0, fd_type("Float")), torch.zeros_like, (floats(3),)),
    ],
    "size": [(lambda fd, x: fd.ops.mul(x, fd.ops.size(x, -1)), lambda x: x * 7, (X,))],
    "slice": [
        (lambda fd, x: fd.ops.slice(x, [1, 0], [4, 100]), lambda x: x[1:4], (X,)),
        (lambda fd, x: fd.ops.slice(x, (0, 2), (5, 3), (1, 1)), lambda x: x[:, 2:3], (X,)),
        (lambda fd, x: fd.ops.slice(x, [9, 0], [12, 7]), lambda x: x[9:12], (X,)),
    ],
    "squeeze": [(lambda fd, x: fd.ops.squeeze(x, [0, -2]), lambda x: x[0, :, 0], (floats(1, 5, 1, 7),))],
    "stride_order": [
        (lambda fd, x: fd.ops.stride_order(x, [0, 2, 1]), lambda x: x, (T,)),
        (lambda fd, x: fd.ops.stride_order(x, []), lambda x: x, (T,)),
    ],
    "sum": [
        (lambda fd, x: fd.ops.sum(x), lambda x: x.sum(), (X,)),
        (lambda fd, x: fd.ops.sum(x, 1, keepdim=True), lambda x: x.sum(1, keepdim=True), (X,)),
        (lambda fd, x: fd.ops.sum(x, [-1, 0]), lambda x: x.sum((0, 2)), (T,)),
        (lambda fd, x: fd.ops.sum(x, [0]), lambda x: x.sum(0), (N.int(),)),
        (lambda fd, x: fd.ops.sum(x, [0], dtype=fd_type("Double")), lambda x: x.double().sum(0), (X,)),
        (lambda fd, x: fd.ops.sum(x, 0), lambda x: x.sum(0), (P,)),
        (lambda fd, x: fd.ops.sum(x, [1]), lambda x: x.sum(1), (floats(5, 1).expand(5, 7),)),
        (lambda fd, x: fd.ops.sum(fd.ops.max(x), 0), lambda x: x.amax(), (X,)),
    ],
    "take_along_axis": [
        (
            lambda fd, x, i: fd.ops.take_along_axis(x, i, -1),
            lambda x, i: x.take_along_dim(i, 1),
            (X, integers(5, 3, low=0, high=7)),
        )
    ],
    "threshold": [
        (
            lambda fd, x: fd.ops.threshold(x, 0.5, -1.0),
            lambda x: torch.nn.functional.threshold(x, 0.5, -1.0),
            (X,),
        )
    ],
    "triu": [(lambda fd, x: fd.ops.triu(x, 1), lambda x: x.triu(1), (X,))],
    "uniform": [
        (
            lambda fd: fd.ops.floor(fd.ops.uniform(2.0, 3.0, [4, 3])),
            lambda: torch.full((4, 3), 2.0),
            (),
        )
    ],
    "var": [(lambda fd, x: fd.ops.var(x, [1], 0, True), lambda x: x.var(1, correction=0, keepdim=True), (X,))],
    "var_mean": [
        (lambda fd, x: fd.ops.var_mean(x, [1]), lambda x: torch.var_mean(x, 1), (X,)),
        (
            lambda fd, x: fd.ops.var_mean(x, dims=(0, 2), correction=0, keepdim=True),
            lambda x: torch.var_mean(x, (0, 2), correction=0, keepdim=True),
            (T,),
        ),
    ],
    "welford": [
        (
            lambda fd, x: fd.ops.welford(x, [1]),
            lambda x: (x.mean(1), x.var(1, correction=0) * 7, torch.full((5,), 7)),
            (X,),
        )
    ],
    "where": [
        (lambda fd, c, x, y: fd.ops.where(c, x, y), torch.where, (P, X, Y)),
        (lambda fd, c, x: fd.ops.where(c, x, -1.0), lambda c, x: torch.where(c, x, -1.0), (Q, X)),
        (lambda fd, c, x: fd.ops.where(c, x, 0), lambda c, x: torch.where(c, x, 0), (P, N)),
    ],
}


class TestValues:
    @pytest.mark.parametrize("name", UNARY)
    def test_of_one_operand(self, nvfuser_stand_in: StandIn, name: str) -> None:
        wanted, operands = UNARY[name]
        for x in operands:
            close(run(nvfuser_stand_in, lambda fd, x: getattr(fd.ops, name)(x), x), wanted(x))

    @pytest.mark.parametrize("name", BINARY)
    def test_of_two_operands(self, nvfuser_stand_in: StandIn, name: str) -> None:
        wanted, operands = BINARY[name]
        for x, y in operands:
            close(run(nvfuser_stand_in, lambda fd, x, y: getattr(fd.ops, name)(x, y), x, y), wanted(x, y))

    @pytest.mark.parametrize("name", OTHERS)
    def test_of_the_others(self, nvfuser_stand_in: StandIn, name: str) -> None:
        for build, wanted, inputs in OTHERS[name]:
            made, expected = run(nvfuser_stand_in, build, *inputs), wanted(*inputs)
            if isinstance(made, Tensor):
                made, expected = [made], [expected]
            for one, other in zip(made, expected, strict=True):
                close(one, other)

    def test_every_operation_that_is_executed_is_tested(self) -> None:
        assert {*UNARY, *BINARY, *OTHERS} == set(EXECUTED)

    def test_numbers_and_scalar_inputs(self, nvfuser_stand_in: StandIn) -> None:
        made = run(nvfuser_stand_in, lambda fd, x, s: fd.ops.add(fd.ops.mul(s, x), fd.ops.mul(s, 2.0)), X, 0.5)
        close(made, X * 0.5 + 1.0)

    def test_a_number_is_as_exact_as_what_it_meets(self, nvfuser_stand_in: StandIn) -> None:
        wide = X.double()
        made = run(nvfuser_stand_in, lambda fd, x: fd.ops.mul(x, fd.define_scalar(0.1, fd_type("Double"))), wide)
        assert torch.equal(made, wide * 0.1)
        assert torch.equal(run(nvfuser_stand_in, lambda fd, x: fd.ops.add(x, 0.1), wide), wide + 0.1)

    def test_lower_ranks_are_broadcast_in_front(self, nvfuser_stand_in: StandIn) -> None:
        made = run(nvfuser_stand_in, lambda fd, x, y: fd.ops.add(fd.ops.mul(x, y), 1.0), X, floats(7))
        close(made, X * floats(7) + 1.0)

    def test_outputs_in_the_order_in_which_they_were_added(self, nvfuser_stand_in: StandIn) -> None:
        first, second, third = run(nvfuser_stand_in, lambda fd, x: [e := fd.ops.exp(x), fd.ops.neg(e), e], X)
        close(first, X.exp())
        close(second, -X.exp())
        assert third is first

    def test_a_long_definition(self, nvfuser_stand_in: StandIn) -> None:
        def build(fd: FusionDefinition, x: Any) -> Any:
            for _ in range(3000):
                x = fd.ops.add(x, 1.0)
            return x

        (made,) = defined(nvfuser_stand_in, build, torch.zeros(3)).execute([torch.zeros(3)])
        close(made, torch.full((3,), 3000.0))


class TestTypes:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_what_promotes_answers_float_for_half_precision(
        self, nvfuser_stand_in: StandIn, dtype: torch.dtype
    ) -> None:
        x, y = X.to(dtype), Y.to(dtype)
        close(run(nvfuser_stand_in, lambda fd, x, y: fd.ops.mul(x, y), x, y), x.float() * y.float())
        close(run(nvfuser_stand_in, lambda fd, x: fd.ops.exp(x), x), x.float().exp())
        close(run(nvfuser_stand_in, lambda fd, x: fd.ops.neg(x), x), -x.float())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_what_does_not_compute_stays_in_half_precision(self, nvfuser_stand_in: StandIn, dtype: torch.dtype) -> None:
        x = X.to(dtype)
        close(run(nvfuser_stand_in, lambda fd, x: fd.ops.abs(x), x), x.abs())
        close(run(nvfuser_stand_in, lambda fd, x: fd.ops.max(x, 1), x), x.amax(1))
        close(run(nvfuser_stand_in, lambda fd, x: fd.ops.cat([x, fd.ops.set(x)]), x), torch.cat([x, x]))
        close(run(nvfuser_stand_in, lambda fd, x: fd.ops.where(fd.ops.gt(x, 0.0), x, 0.0), x), x.relu())
        close(run(nvfuser_stand_in, lambda fd, x: fd.ops.isfinite(x), x), x.isfinite())

    @pytest.mark.parametrize(
        ("name", "call"),
        [
            *((name, lambda op, x: op(x)) for name in ("ceil", "floor", "frac", "relu", "round", "silu", "trunc")),
            *((name, lambda op, x: op(x)) for name in ("isinf", "isnan", "isneginf", "isposinf")),
            *((name, lambda op, x: op(x, -1.0, 1.0)) for name in ("clamp", "threshold")),
            *(
                (name, lambda op, x: op(x, 0))
                for name in ("sum", "prod", "min", "cumsum", "cumprod", "cummin", "cummax")
            ),
            ("welford", lambda op, x: op(x, [0])),
            ("sum", lambda op, x: op(x, dtype=fd_type("Half"))),
        ],
    )
    def test_what_has_no_kernel_for_half_precision(self, nvfuser_stand_in: StandIn, name: str, call: Build) -> None:
        with nvfuser_stand_in.FusionDefinition() as fd:
            x = fd.from_pytorch(X.bfloat16())
            with pytest.raises(
                RuntimeError, match=rf"{name} is not compiled for DataType\.(BFloat16|Half): .* Cast to"
            ):
                call(getattr(fd.ops, name), x)

    def test_a_relu_of_integers_passes_through_float(self, nvfuser_stand_in: StandIn) -> None:
        x = torch.tensor([2**24 + 1, -3])
        assert run(nvfuser_stand_in, lambda fd, x: fd.ops.relu(x), x).tolist() == [2**24, 0]

    def test_an_integer_tensor_with_a_float_is_double(self, nvfuser_stand_in: StandIn) -> None:
        close(run(nvfuser_stand_in, lambda fd, x: fd.ops.mul(x, 0.5), N), N.double() * 0.5)
        close(run(nvfuser_stand_in, lambda fd, x: fd.ops.mul(x, 2), N.int()), N.int() * 2)

    def test_a_choice_between_numbers_is_double(self, nvfuser_stand_in: StandIn) -> None:
        close(run(nvfuser_stand_in, lambda fd, c: fd.ops.where(c, 1.0, 0.0), P), P.double())

    def test_true_is_an_integer_unless_its_type_is_given(self, nvfuser_stand_in: StandIn) -> None:
        close(run(nvfuser_stand_in, lambda fd, c: fd.ops.where(c, True, False), P), P.long())
        scalar = run(
            nvfuser_stand_in,
            lambda fd, c: fd.ops.where(
                c, fd.define_scalar(True, fd_type("Bool")), fd.define_scalar(False, dtype=fd_type("Bool"))
            ),
            P,
        )
        close(scalar, P)

    def test_bools_are_subtracted_as_integers(self, nvfuser_stand_in: StandIn) -> None:
        close(run(nvfuser_stand_in, lambda fd, p, q: fd.ops.sub(p, q), P, ~P), P ^ ~P)

    def test_double_stays_double(self, nvfuser_stand_in: StandIn) -> None:
        close(run(nvfuser_stand_in, lambda fd, x, y: fd.ops.add(x, y), X.double(), Y), X.double() + Y)

    def test_a_tensor_without_dimensions_yields_to_one_with_them(self, nvfuser_stand_in: StandIn) -> None:
        zero = torch.tensor(0.5, dtype=torch.float64)
        close(run(nvfuser_stand_in, lambda fd, x, z: fd.ops.mul(x, z), X, zero), X * zero)


@pytest.mark.parametrize(
    ("first", "second", "wanted"),
    [
        ("Half", "BFloat16", "Float"),
        ("Half", "Int", "Float"),
        ("Half", "Double", "Double"),
        ("Int", "Float", "Float"),
        ("Int32", "Int", "Int"),
        ("Int32", "Bool", "Int32"),
        ("ComplexFloat", "Double", "ComplexDouble"),
        ("ComplexFloat", "Half", "ComplexFloat"),
        ("ComplexFloat", "Int", "ComplexFloat"),
    ],
)
def test_two_tensors_meet_in_a_type(nvfuser_stand_in: StandIn, first: str, second: str, wanted: str) -> None:
    with nvfuser_stand_in.FusionDefinition() as fd:
        x, y = (fd.define_tensor([3], True, fd_type(name)) for name in (first, second))
        assert fd.ops.mul(x, y).dtype() is fd.ops.mul(y, x).dtype() is fd_type(wanted)


@pytest.mark.parametrize(
    ("tensor", "scalar", "wanted"),
    [
        ("Float", "Double", "Float"),
        ("Half", "Double", "Float"),
        ("Int", "Float", "Float"),
        ("Int", "Double", "Double"),
        ("Bool", "Double", "Double"),
        ("Bool", "Int", "Int"),
        ("Int32", "Int", "Int32"),
        ("Int", "Index", "Int"),
        ("Float", "ComplexDouble", "ComplexFloat"),
        ("Double", "ComplexFloat", "ComplexDouble"),
        ("Int", "ComplexFloat", "ComplexFloat"),
        ("ComplexFloat", "Double", "ComplexFloat"),
    ],
)
def test_a_tensor_and_a_scalar_meet_in_a_type(nvfuser_stand_in: StandIn, tensor: str, scalar: str, wanted: str) -> None:
    with nvfuser_stand_in.FusionDefinition() as fd:
        x, s = fd.define_tensor([3], True, fd_type(tensor)), fd.define_scalar(fd_type(scalar))
        assert fd.ops.mul(x, s).dtype() is fd.ops.mul(s, x).dtype() is fd_type(wanted)


def test_sizes_that_are_known(nvfuser_stand_in: StandIn) -> None:
    with nvfuser_stand_in.FusionDefinition() as fd:
        x = fd.define_tensor([5, 7], True)
        assert (x.size(0).value, x.ndim, x.is_tensor(), x.is_symbolic()) == (5, 2, True, True)
        assert not x.size(1).is_symbolic()
        flat = fd.ops.reshape(x, [1, -1])
        part = fd.ops.slice(flat, [0, 0], [1, 7])
        wide = fd.ops.expand(part, [5, 7])
        fd.add_output(fd.ops.add(fd.ops.expand(x, [-1, 7]), wide))
        fd.add_output(fd.ops.slice(x, [3, 0], [9, 7]))
        assert [axis.size for tensor in (flat, part, wide) for axis in tensor.axes] == [1, 35, 1, 7, 5, 7]
    assert fd.fusion.inputs == [x]
    first, second = fd.execute([X])
    close(first, X + X[0])
    close(second, X[3:])


class TestMemory:
    def test_what_moves_nothing_is_a_view_of_the_input(self, nvfuser_stand_in: StandIn) -> None:
        for build in (
            lambda fd, x: fd.ops.set(x),
            lambda fd, x: fd.ops.permute(x, [1, 0]),
            lambda fd, x: x,
        ):
            x = X.clone()
            assert run(nvfuser_stand_in, build, x).data_ptr() == x.data_ptr()

    def test_a_stride_order_is_kept(self, nvfuser_stand_in: StandIn) -> None:
        made = run(nvfuser_stand_in, lambda fd, x: fd.ops.stride_order(fd.ops.neg(x), [0, 2, 1]), T)
        assert made.stride() == (1, 8, 2)

    def test_an_output_may_be_written_into_an_input(self, nvfuser_stand_in: StandIn) -> None:
        with nvfuser_stand_in.FusionDefinition() as fd:
            t = fd.from_pytorch(X)
            added = fd.ops.add(t, 1.0)
            fd.add_output(added, alias_input=t)
            fd.add_output(fd.ops.neg(t))
            fd.add_output(added)
        x = X.clone()
        negated, written = fd.execute([x])
        close(negated, -X)
        close(x, X + 1.0)
        assert written is x


class TestRandomNumbers:
    def build(self, offset: int) -> Build:
        return lambda fd, seed: fd.ops.uniform(
            0.0, 1.0, [64, 64], rng_seed=seed, rng_offset=fd.define_scalar(offset), dtype=fd_type("Float")
        )

    def test_are_a_function_of_seed_and_offset(self, nvfuser_stand_in: StandIn) -> None:
        first = run(nvfuser_stand_in, self.build(0), 17)
        assert torch.equal(first, run(nvfuser_stand_in, self.build(0), 17))
        assert not torch.equal(first, run(nvfuser_stand_in, self.build(0), 18))
        assert not torch.equal(first, run(nvfuser_stand_in, self.build(4), 17))
        assert 0.0 <= first.min() < 0.01
        assert 0.99 < first.max() < 1.0

    def test_a_normal_one_has_its_mean_and_deviation(self, nvfuser_stand_in: StandIn) -> None:
        made = run(
            nvfuser_stand_in,
            lambda fd, seed: fd.ops.normal(3.0, 0.5, [64, 64], rng_seed=seed, rng_offset=seed),
            5,
        )
        assert abs(made.mean() - 3.0) < 0.05
        assert abs(made.std() - 0.5) < 0.05
