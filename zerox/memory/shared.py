"""Attributes that an optimizer and the wrappers that frameworks put around it have together."""

from __future__ import annotations

from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class Shared(Generic[T]):
    """Declares an attribute that changes after construction: ``_joining = Shared[str | None](None)``.

    Lightning's wrapper inherits from the optimizer's class, and looks up in the optimizer what it does not find in
    itself; Fabric's has a copy of the optimizer's ``__dict__``. A method that is called on either sets attributes of
    the wrapper, which step() would never see. Values of this class lie in ``_shared``, a dict that both wrappers find.
    """

    def __init__(self, default: T) -> None:
        self.default = default
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Shared[T]: ...

    @overload
    def __get__(self, instance: Any, owner: type) -> T: ...

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else instance._shared.get(self.name, self.default)

    def __set__(self, instance: Any, value: T) -> None:
        instance._shared[self.name] = value
