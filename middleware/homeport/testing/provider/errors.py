"""The error bodies of a Responses provider, word for word (WIRE.md section 2)."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["ApiError", "invalid_encrypted", "invalid_type", "item_missing", "missing"]


class ApiError(Exception):
    """An answer in the provider's error envelope; all four keys are always there."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        type_: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error: dict[str, str | None] = {"message": message, "type": type_, "param": param, "code": code}

    def body(self) -> bytes:
        return msgspec.json.encode({"error": self.error})


def missing(what: str, name: str) -> ApiError:
    """404 of an unknown object; ``what`` is ``Response``, ``Conversation``, ``Container``, ``Prompt``."""
    return ApiError(404, f"{what} with id '{name}' not found.")


def item_missing(name: str) -> ApiError:
    return ApiError(
        404,
        f"Item with id '{name}' not found. Items are not persisted when `store` is set to false. "
        "Try again with `store` set to true, or remove this item from your input.",
        param="input",
    )


def invalid_encrypted() -> ApiError:
    return ApiError(
        400,
        "The encrypted content could not be verified. Reason: Encrypted content could not be decrypted or parsed.",
        code="invalid_encrypted_content",
    )


def invalid_type(param: str, expected: str, value: Any) -> ApiError:
    return ApiError(
        400,
        f"Invalid type for '{param}': expected {expected}, but got {_json_type(value)} instead.",
        code="invalid_type",
        param=param,
    )


def _json_type(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int():
            return "an integer"
        case float():
            return "a decimal"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"
