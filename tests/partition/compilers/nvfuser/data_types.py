"""nvFuser's element types, and how they are promoted: its rules, which are not torch's everywhere.

After nvFuser 0.2.36, `csrc/type.h` and `csrc/type_promotion.cpp`. Two of them surprise: half precision is promoted to
float by every operation that promotes at all, and an integer tensor with a Python float becomes double.
"""

import enum
from collections.abc import Sequence

import torch

__all__ = ["DataType", "common_type", "of_torch", "promoted", "to_torch"]


class DataType(enum.Enum):
    """The element types that the binding knows, by its names; `Int` is the 64-bit one."""

    Double = enum.auto()
    Float = enum.auto()
    Half = enum.auto()
    Int = enum.auto()
    Int32 = enum.auto()
    UInt64 = enum.auto()
    Index = enum.auto()
    Bool = enum.auto()
    BFloat16 = enum.auto()
    Float8_e4m3fn = enum.auto()
    Float8_e5m2 = enum.auto()
    Float8_e8m0fnu = enum.auto()
    Float4_e2m1fn = enum.auto()
    Float4_e2m1fn_x2 = enum.auto()
    ComplexFloat = enum.auto()
    ComplexDouble = enum.auto()
    Null = enum.auto()

    def __repr__(self) -> str:
        return f"DataType.{self.name}"

    @property
    def is_reduced(self) -> bool:
        return self in _REDUCED

    @property
    def is_floating(self) -> bool:
        return self in (DataType.Double, DataType.Float) or self.is_reduced

    @property
    def is_integral(self) -> bool:
        return self in (DataType.Int, DataType.Int32, DataType.UInt64, DataType.Index)

    @property
    def is_complex(self) -> bool:
        return self in (DataType.ComplexFloat, DataType.ComplexDouble)

    @property
    def family(self) -> str:
        """Within one family a scalar is not cast, and a value of one may stand for another."""
        if self.is_floating:
            return "floating"
        if self.is_integral:
            return "integral"
        return "complex" if self.is_complex else "bool"


_REDUCED = (
    DataType.Half,
    DataType.BFloat16,
    DataType.Float8_e4m3fn,
    DataType.Float8_e5m2,
    DataType.Float8_e8m0fnu,
    DataType.Float4_e2m1fn,
)

_TO_TORCH = {
    DataType.Double: torch.float64,
    DataType.Float: torch.float32,
    DataType.Half: torch.float16,
    DataType.BFloat16: torch.bfloat16,
    DataType.Int: torch.int64,
    DataType.Index: torch.int64,
    DataType.Int32: torch.int32,
    DataType.Bool: torch.bool,
    DataType.ComplexFloat: torch.complex64,
    DataType.ComplexDouble: torch.complex128,
}
_OF_TORCH: dict[torch.dtype | type, DataType] = {
    **{torch_type: data_type for data_type, torch_type in _TO_TORCH.items() if data_type is not DataType.Index},
    torch.float8_e4m3fn: DataType.Float8_e4m3fn,
    torch.float8_e5m2: DataType.Float8_e5m2,
    torch.float8_e8m0fnu: DataType.Float8_e8m0fnu,
    complex: DataType.ComplexDouble,
    float: DataType.Double,
    int: DataType.Int,
    bool: DataType.Bool,
}


def to_torch(data_type: DataType) -> torch.dtype:
    """The torch dtype of a DataType. Raises NotImplementedError for those that the stand-in does not compute in."""
    if data_type not in _TO_TORCH:
        raise NotImplementedError(f"{data_type!r} is not executed by this stand-in")
    return _TO_TORCH[data_type]


def of_torch(dtype: torch.dtype | type) -> DataType:
    """`nvfuser_direct.pytorch_utils.torch_dtype_to_nvfuser_dtype`: a KeyError for what it does not know."""
    return _OF_TORCH[dtype]


def promoted(first: DataType, second: DataType) -> DataType:
    """The type that holds both, as nvFuser's `promoteType` finds it: C++'s rules, and torch's for half precision."""
    if first is second:
        return first
    pair = {first, second}
    if DataType.Index in pair and all(one.is_integral for one in pair):
        return DataType.Index
    if any(one.is_complex for one in pair):
        wide = DataType.ComplexDouble in pair or DataType.Double in pair
        return DataType.ComplexDouble if wide else DataType.ComplexFloat
    if DataType.Double in pair:
        return DataType.Double
    if all(one.is_floating for one in pair):
        return DataType.Float
    for one in pair:
        if one.is_floating:
            return one
    return DataType.Int if DataType.Int in pair else DataType.Int32


def _skipping_none(first: DataType | None, second: DataType | None) -> DataType | None:
    return promoted(first, second) if first is not None and second is not None else first or second


def _category(higher: DataType | None, lower: DataType | None) -> DataType | None:
    """What the types of one category of operands make of the next lower one."""
    if higher is None or lower is None:
        return higher or lower
    if higher.is_complex:
        return higher
    if lower.is_complex:
        if not higher.is_floating:
            return lower
        if higher.is_reduced:
            raise RuntimeError(f"Only support Float and Double, current type:{higher!r}")
        return DataType.ComplexDouble if higher is DataType.Double else DataType.ComplexFloat
    if higher.is_floating:
        return higher
    if higher is DataType.Bool or lower.is_floating:
        return promoted(higher, lower)
    return higher


def common_type(
    operands: Sequence[tuple[DataType, int | None]], *, integers_to_float: bool = False, half_to_float: bool = True
) -> DataType:
    """The type that an operation computes in.

    `operands` are pairs of a type and a rank, which is None for a scalar: tensors of a rank come before tensors without
    one, and those before scalars.
    """
    types = [data_type for data_type, _ in operands]
    common = types[0]
    if any(data_type is not common for data_type in types):
        shaped: DataType | None = None
        bare: DataType | None = None
        scalar: DataType | None = None
        for data_type, rank in operands:
            if rank is None:
                scalar = _skipping_none(scalar, DataType.Float if data_type.is_reduced else data_type)
            elif rank:
                shaped = _skipping_none(shaped, data_type)
            else:
                bare = _skipping_none(bare, data_type)
        found = _category(shaped, _category(bare, scalar))
        assert found is not None
        common = found
    if integers_to_float and common.family in ("integral", "bool"):
        common = DataType.Float
    return DataType.Float if half_to_float and common.is_reduced else common
