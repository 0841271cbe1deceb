"""Pydantic models whose every way in raises this package's errors, never pydantic's.

A subclass says what a pydantic error means in `_refusal`, and what a foreign name means in `_foreign`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from paged_schema.errors import InvalidArgument


class TypedModel(BaseModel):
    """A frozen, strict model that admits no unknown name."""

    # Building the validator takes longer than importing pydantic, so the first use pays for it.
    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", defer_build=True, ser_json_inf_nan="constants"
    )

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise self._refusal(error) from None

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copy, with the changes checked like any other value."""
        if update is None:
            return super().model_copy(deep=deep)
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return self.model_validate(given | dict(update))

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Build from a mapping of names."""
        return cls._built(super().model_validate, cls._named(obj), options)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        """Build from JSON text."""
        return cls._built(super().model_validate_json, json_data, options)

    @classmethod
    def model_validate_strings(cls, obj: Any, **options: Any) -> Self:
        """Build from a mapping of names to text."""
        return cls._built(super().model_validate_strings, cls._named(obj), options)

    @classmethod
    def _built(cls, build: Callable[..., Self], given: Any, options: Mapping[str, Any]) -> Self:
        try:
            return build(given, **options)
        except ValidationError as error:
            raise cls._refusal(error) from None
        except UnicodeEncodeError as error:
            wanted = "text that UTF-8 can hold"
            raise InvalidArgument("load", "A01", "text", error.object, wanted, "INVALID_GRAPH") from None

    @classmethod
    def _named(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        for name in given:
            if not isinstance(name, str):
                raise cls._foreign(name)
        return dict(given)

    @classmethod
    def _refusal(cls, error: ValidationError) -> InvalidArgument:
        raise NotImplementedError

    @classmethod
    def _foreign(cls, name: object) -> InvalidArgument:
        raise NotImplementedError
