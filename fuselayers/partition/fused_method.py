"""fused_method -- a fused function with its first argument given, as `instance.method` is."""

import copy
import inspect
from collections.abc import Callable
from typing import Any


class FusedMethod:
    """A bound method of a fused function, as `types.MethodType` is of a plain one.

    Dynamo can neither make nor inspect a MethodType of an object: `torch.compile` would refuse a call of the method,
    and a module whose forward it is. Dynamo can make objects of a plain class. This one does all that a method does.

    Attributes:
        __func__: the function; its attributes can be read here too.
        __self__: its first argument.
    """

    def __init__(self, function: Callable[..., Any], instance: Any) -> None:
        self.__func__ = function
        self.__self__ = instance

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "__func__":  # Dynamo makes it empty first
            raise AttributeError(name)
        return getattr(self.__func__, name)

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self.__func__.__doc__

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self.__func__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FusedMethod):
            return NotImplemented
        return self.__func__ is other.__func__ and self.__self__ is other.__self__

    def __hash__(self) -> int:
        bound = vars(self)  # empty while Dynamo makes it, which asks for the hash since 2.14
        return hash((id(bound.get("__func__")), id(bound.get("__self__"))))

    def __deepcopy__(self, memo: dict[int, Any]) -> "FusedMethod":
        return FusedMethod(self.__func__, copy.deepcopy(self.__self__, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.__self__, self.__func__.__name__)

    def __repr__(self) -> str:
        return f"<fused method {self.__func__.__qualname__} of {self.__self__!r}>"
