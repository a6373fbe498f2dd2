"""Values that must never be printed: keys, tokens, DEKs (§20.6)."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T", str, bytes)

REDACTED = "<redacted>"


class Secret(Generic[T]):
    """Holds a secret; printing, formatting and pickling show nothing. `reveal()` marks every place that uses it."""

    __slots__ = ("_value",)

    def __init__(self, value: T) -> None:
        self._value: T = value

    def reveal(self) -> T:
        """The value; never log what it returns."""
        return self._value

    def __repr__(self) -> str:
        return REDACTED

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(REDACTED, spec)

    def __bool__(self) -> bool:
        return bool(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._value == other._value

    def __hash__(self) -> int:
        return hash((Secret, self._value))

    def __reduce__(self) -> str:
        raise TypeError("a Secret is not serialised")
