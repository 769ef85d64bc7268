"""fused_method -- a fused function bound to its first argument, like `instance.method`."""

import copy
import inspect
from collections.abc import Callable
from typing import Any


class FusedMethod:
    """A bound method of a fused function, like `types.MethodType` for a plain function.

    Dynamo can neither create nor inspect a MethodType whose function is an object: `torch.compile` would refuse to call
    the method, and to compile a module whose forward it is. Dynamo can create instances of a plain class such as this,
    which does all that a method does.

    Attributes:
        __func__: the function; its attributes can be read from the method too.
        __self__: its first argument.
    """

    def __init__(self, function: Callable[..., Any], instance: Any) -> None:
        self.__func__ = function
        self.__self__ = instance

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "__func__":  # Dynamo creates the method without attributes first
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
        bound = vars(self)  # empty while Dynamo creates it; since torch 2.14 Dynamo hashes it then
        return hash((id(bound.get("__func__")), id(bound.get("__self__"))))

    def __deepcopy__(self, memo: dict[int, Any]) -> "FusedMethod":
        return FusedMethod(self.__func__, copy.deepcopy(self.__self__, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.__self__, self.__func__.__name__)

    def __repr__(self) -> str:
        return f"<fused method {self.__func__.__qualname__} of {self.__self__!r}>"
