"""The errors a client can meet, as statuses and as the JSON envelope OpenAI's SDKs read.

One constructor per row of the error table; whoever finds the fault raises or renders the `ApiError`. The
public surface turns it into a response, the worker into the head and body of an answer. Shared by both.

The statuses are chosen by what the SDKs do: they try 408, 409, 429 and every 5xx again, so what will fail
again is a 4xx, or carries `x-should-retry: false`.
"""

from enum import StrEnum
from typing import Any

import orjson

RETRY_AFTER_MIN_S = 1
RETRY_AFTER_MAX_S = 30  # SDKs give up retrying beyond two minutes, older ones beyond one
QUOTED_MAX_CHARS = 200

_NO_RETRY = ("x-should-retry", "false")
_UNREADABLE = {
    431: "The request's headers are larger than this server reads.",
    501: "The request has a Transfer-Encoding other than chunked.",
}


class ErrorType(StrEnum):
    """Whose fault it is, in the API's words."""

    INVALID_REQUEST = "invalid_request_error"
    SERVER = "server_error"
    UNAVAILABLE = "service_unavailable_error"


class ApiError(Exception):
    """A request ends with this status and envelope.

    `extra` are further keys of the error object, beside the four that are always there.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: ErrorType = ErrorType.INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
        extra: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = headers
        self.extra = extra or {}

    def body(self) -> bytes:
        """The envelope."""
        return error_body(self.message, self.type, self.param, self.code, **self.extra)


def error_body(
    message: str,
    type: ErrorType,
    param: str | None = None,
    code: str | None = None,
    **extra: Any,
) -> bytes:
    """The JSON envelope; all four keys are always present."""
    error = {"message": _encodable(message), "type": type, "param": param, "code": code, **extra}
    return orjson.dumps({"error": error})


# --- the caller's fault ---------------------------------------------------------------------------------


def bad_json(reason: str) -> ApiError:
    """The body is not JSON, or not JSON of an object."""
    return ApiError(400, f"The request body could not be read as JSON: {reason}.")


def wrong_content_type(content_type: str) -> ApiError:
    """The body says it is something other than JSON."""
    return ApiError(
        400, f"The request body must be application/json; its Content-Type is '{quoted(content_type)}'."
    )


def unsupported_charset(charset: str) -> ApiError:
    """The body says its text is in an encoding other than UTF-8."""
    return _unsupported(f"The request body must be UTF-8; its charset is '{quoted(charset)}'.")


def unsupported_coding(coding: str) -> ApiError:
    """The body says it is compressed. Source: RFC 9110, section 15.5.16, for the header."""
    message = f"The request body must not be compressed; its Content-Encoding is '{quoted(coding)}'."
    return _unsupported(message, (("accept-encoding", "identity"),))


def _unsupported(message: str, headers: tuple[tuple[str, str], ...] = ()) -> ApiError:
    return ApiError(415, message, code="unsupported_media_type", headers=headers)


def missing_parameter(param: str) -> ApiError:
    """A required field is absent."""
    return ApiError(
        400, f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
    )


def invalid_type(param: str | None, reason: str) -> ApiError:
    """A field is of the wrong JSON type."""
    return ApiError(400, _about(param, reason), param=param, code="invalid_type")


def invalid_value(param: str | None, reason: str) -> ApiError:
    """A field's value is out of its range, or asks for what this server does not do."""
    return ApiError(400, _about(param, reason), param=param, code="invalid_value")


def model_not_found(model: str) -> ApiError:
    """Nobody has ever served this model here."""
    return ApiError(
        404,
        f"The model `{quoted(model)}` does not exist or you do not have access to it.",
        param="model",
        code="model_not_found",
    )


def context_length_exceeded(n_prompt: int, n_ctx: int) -> ApiError:
    """The prompt alone leaves no room for one token of answer. Units: tokens."""
    return ApiError(
        400,
        f"This model's maximum context length is {n_ctx} tokens. However, your messages resulted in"
        f" {n_prompt} tokens. Please reduce the length of the messages.",
        param="messages",
        code="context_length_exceeded",
        extra={"n_prompt_tokens": n_prompt, "n_ctx": n_ctx},
    )


def unknown_route(method: str, path: str) -> ApiError:
    """No such path."""
    return ApiError(404, f"Unknown request URL: {method} {quoted(path)}.")


def wrong_method(method: str, path: str, allowed: tuple[str, ...]) -> ApiError:
    """The path exists, but not for this method."""
    return ApiError(
        405,
        f"Method {quoted(method)} is not allowed for {path}; it takes {', '.join(allowed)}.",
        headers=(("allow", ", ".join(allowed)),),
    )


def request_too_large(limit_bytes: int) -> ApiError:
    """The body is longer than the server reads."""
    return ApiError(
        413, f"The request body is larger than the limit of {limit_bytes} bytes.", code="request_too_large"
    )


def body_timeout(timeout_s: float) -> ApiError:
    """The body came too slowly."""
    return ApiError(
        408, f"The request body did not arrive within {timeout_s:g} seconds.", code="request_timeout"
    )


def head_timeout(timeout_s: float) -> ApiError:
    """The headers came too slowly."""
    return ApiError(
        408, f"The request's headers did not arrive within {timeout_s:g} seconds.", code="request_timeout"
    )


def unreadable_head(status: int) -> ApiError:
    """What came is not HTTP, or more of it than is read; the HTTP library chose the status."""
    message = _UNREADABLE.get(status, "The request could not be read as HTTP/1.1.")
    return ApiError(status, message, headers=(_NO_RETRY,) if status >= 500 else ())


# --- nobody's fault, or ours ----------------------------------------------------------------------------


def overloaded(reason: str, retry_after_s: int, why: str) -> ApiError:
    """There is no place for the request now. `reason` is of a closed set and goes into the envelope."""
    wait_s = min(max(retry_after_s, RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S)
    return ApiError(
        503,
        f"{why[:1].upper()}{why[1:]}.",
        type=ErrorType.UNAVAILABLE,
        code="server_is_overloaded",
        headers=(("retry-after", str(wait_s)),),
        extra={"reason": reason},
    )


def worker_unavailable(message: str, *, is_hopeless: bool = False) -> ApiError:
    """The worker that answered was lost before the first byte, and no other could take over.

    A request that several workers were lost over may be what ends them: to send it again would end more.
    """
    headers = (_NO_RETRY,) if is_hopeless else ()
    return ApiError(502, message, type=ErrorType.SERVER, code="worker_unavailable", headers=headers)


def deadline_passed(message: str) -> ApiError:
    """The request's own time limit ran out; it would run out again."""
    return ApiError(504, message, type=ErrorType.SERVER, code="timeout", headers=(_NO_RETRY,))


def internal(message: str = "The server had an error while processing your request.") -> ApiError:
    """A fault of ours. The message holds no traceback and no path."""
    return ApiError(500, message, type=ErrorType.SERVER, headers=(_NO_RETRY,))


def quoted(text: str) -> str:
    """What a client sent, short enough to be sent back."""
    return text if len(text) <= QUOTED_MAX_CHARS else text[: QUOTED_MAX_CHARS - 3] + "..."


def _about(param: str | None, reason: str) -> str:
    return f"Invalid request: {reason}." if param is None else f"Invalid '{param}': {reason}."


def _encodable(text: str) -> str:
    """Text without lone surrogates: an error must be sendable whatever it quotes."""
    return text.encode("utf-8", "replace").decode()
