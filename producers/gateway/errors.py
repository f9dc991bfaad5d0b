"""What a call is refused with: OpenAI's form of an error, `{"error": {message, type, param, code}}`."""

from __future__ import annotations

from typing import Any

from streamrl.errors import StreamRLError


class ApiError(StreamRLError):
    """A refusal. Its message and hint are the answer's message.

    Args:
        status: HTTP status.
        message: what was expected, and what was got.
        hint: what the caller can do.
        code: a word for programs, such as `context_length_exceeded`.
        param: the field of the request that it is about.
        retry_after_s: after which the same call may be answered; 0: it is not said.
    """

    def __init__(self, status: int, message: str, *, hint: str = "", code: str = "", param: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message, hint=hint, status=status, code=code, param=param, retry_after_s=retry_after_s)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.status, self.message, self.hint, self.code, self.param, self.retry_after_s)

    @property
    def kind(self) -> str:
        """OpenAI's word for its kind."""
        words = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        return words.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> dict[str, Any]:
        """The answer."""
        message = f"{self.message}; hint: {self.hint}" if self.hint else self.message
        return {"error": {"message": message, "type": self.kind, "param": self.param or None, "code": self.code or None}}

    def anthropic_body(self) -> dict[str, Any]:
        """The same in Anthropic's form."""
        words = {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
        error = self.body()["error"]
        field = f"{self.param}: " if self.param else ""
        return {"type": "error", "error": {"type": words.get(self.status, self.kind), "message": field + error["message"]}}


def _again(status: int, message: str, hint: str, code: str, param: str, retry_after_s: float) -> ApiError:
    return ApiError(status, message, hint=hint, code=code, param=param, retry_after_s=retry_after_s)


def refused(message: str, *, hint: str = "", code: str = "", param: str = "") -> ApiError:
    """400: the request itself."""
    return ApiError(400, message, hint=hint, code=code, param=param)


def later(message: str, seconds: float, *, hint: str = "", code: str = "", status: int = 503) -> ApiError:
    """The same call may be answered after some seconds; SDKs repeat it by themselves."""
    return ApiError(status, message, hint=hint, code=code, retry_after_s=seconds)


def gone(message: str, *, hint: str = "", code: str = "session_ended") -> ApiError:
    """410: nothing will be answered any more, which SDKs do not repeat."""
    return ApiError(410, message, hint=hint, code=code)


def too_long(length: int, max_len: int) -> ApiError:
    """The refusal of a prompt that leaves no room for an answer."""
    most = f"at most {max_len - 1} tokens (model.max_len = {max_len}, of which an answer needs one)" if max_len else "fewer tokens"
    return refused(f"expected a prompt of {most}, got {length}", hint="shorten the conversation", code="context_length_exceeded")
