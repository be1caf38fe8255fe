"""The shape of a chat completion request, and the one parse that decides whether it is well formed.

`parse_chat` is complete without a model: what passes it can only be refused for what depends on the model
(length, template). The public surface calls it before a request takes a lane, the worker calls it again.

Types are strict, null means absent, unknown fields are ignored. What is known but cannot be honoured yet is
refused by name: an answer that silently ignored it would be wrong.
"""

import re
from enum import StrEnum
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from llm_ingress.api.errors import ApiError, bad_json, invalid_type, invalid_value, missing_parameter, quoted
from llm_ingress.api.surrogates import find_half_pair

STOPS_MAX = 16
STOP_MAX_CHARS = 1024
ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

T = TypeVar("T")

INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

# JSON has one kind of number: many encoders write a billion tokens as 1e9 or 1000000000.0.
TokenLimit: TypeAlias = Annotated[int, Meta(ge=1)] | Annotated[float, Meta(ge=1)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
RepeatPenalty: TypeAlias = Annotated[float, Meta(ge=0.1, le=10)]
Stop: TypeAlias = Annotated[str, Meta(min_length=1, max_length=STOP_MAX_CHARS)]


class ContentPart(Struct, frozen=True):
    """One part of a message's content; only text parts are taken."""

    type: str
    text: str | None = None


class ChatMessage(Struct, frozen=True):
    """One turn."""

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None

    @property
    def text(self) -> str:
        """All text of the content, in order."""
        if isinstance(self.content, list):
            return "".join(part.text or "" for part in self.content)
        return self.content or ""


class StreamOptions(Struct, frozen=True):
    """What a stream carries besides the answer."""

    include_usage: bool | None = None


class TemplateOptions(Struct, frozen=True):
    """Switches of the chat template that clients may set."""

    enable_thinking: bool | None = None


class Truncation(StrEnum):
    """What is done for a conversation that outgrew the context."""

    AUTO = "auto"  # its older turns become a summary
    DISABLED = "disabled"  # it is refused


class ChatRequest(Struct, frozen=True, kw_only=True):
    """The body of POST /v1/chat/completions; the properties are what it means."""

    model: Annotated[str, Meta(min_length=1)]
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]

    stream: bool | None = None
    stream_options: StreamOptions | None = None

    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=STOPS_MAX)] | None = None

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=INT64_MIN, le=INT64_MAX)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repeat_penalty: RepeatPenalty | None = None
    repetition_penalty: RepeatPenalty | None = None

    think: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    user: str | None = None
    truncation: Truncation | None = None
    prompt_cache_key: str | None = None
    conversation_id: str | None = None

    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    audio: Any = None
    modalities: list[str] | None = None
    logit_bias: dict[str, Any] | None = None

    @property
    def streams(self) -> bool:
        """Whether the answer comes as events."""
        return bool(self.stream)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def token_limit(self) -> int | None:
        """Most tokens the client wants, or None for as many as there is room."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return None if limit is None else int(limit)

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end the answer."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def penalty_of_repeats(self) -> float | None:
        """The repeat penalty under either of its names."""
        return self.repetition_penalty if self.repeat_penalty is None else self.repeat_penalty

    @property
    def thinking(self) -> bool:
        """Whether the model is asked to think first; off unless asked."""
        if self.think is not None:
            return self.think
        return self.chat_template_kwargs is not None and bool(self.chat_template_kwargs.enable_thinking)

    @property
    def turns(self) -> tuple[dict[str, str], ...]:
        """The conversation as role and text; a developer is a system."""
        return tuple({"role": ROLES[turn.role], "content": turn.text} for turn in self.messages)


_DECODER = msgspec.json.Decoder(ChatRequest)
_WHERE = re.compile(r"(?s)(?P<reason>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?\Z")
_MISSING = re.compile(r"Object missing required field `(\w+)`\Z")
_TYPES = re.compile(r"`([a-z]+(?: \| [a-z]+)*)`")
_JSON_TYPES: Final = {"int": "integer", "float": "number", "str": "string", "bool": "boolean"}


def parse_chat(body: bytes) -> ChatRequest:
    """Read and check a request body.

    Raises: ApiError, a 400 whose `param` is the path of the field at fault.
    """
    request = read_body(body, _DECODER)
    check_token_limits(request, "max_tokens", "max_completion_tokens")
    _check_messages(request.messages)
    _check_options(request)
    return request


def read_body(body: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    """Read a body into its shape. Raises: ApiError, a 400 whose `param` is the path of the field at fault."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _explain_unreadable(body, str(error), decoder) from error
    except RecursionError as error:
        raise bad_json("it is nested too deeply") from error


def _explain_unreadable(body: bytes, text: str, decoder: "msgspec.json.Decoder[Any]") -> ApiError:
    """Say of a body that no parser reads what is wrong, and where if that is known."""
    half = find_half_pair(body)
    if half is None:
        return bad_json(text)
    reason = f"{half.escape} is half of a surrogate pair, which is no text"
    path = _path_of_value(body, half.string_at, decoder)
    if path is None:
        return bad_json(f"{reason} (in the string at byte {half.string_at})")
    return invalid_value(path, reason)


def _path_of_value(body: bytes, at: int, decoder: "msgspec.json.Decoder[Any]") -> str | None:
    """Return the field whose value begins there; None for one that is not of the schema.

    The parser itself tells: with a number in the value's place it stops there.
    """
    try:
        decoder.decode(body[:at] + b"0,")
    except msgspec.ValidationError as error:
        return _explain(str(error)).param
    except msgspec.DecodeError:
        pass
    return None


def _explain(text: str) -> ApiError:
    """Translate what msgspec says about a field into the API's words."""
    match = _WHERE.match(text)
    assert match is not None, text
    reason, path = match["reason"], match["path"] or ""
    missing = _MISSING.match(reason)
    if missing is not None:
        return missing_parameter(f"{path}.{missing[1]}".lstrip("."))
    if not path:
        return invalid_type(None, "the body must be a JSON object")
    if ", got `null`" in reason and not path.endswith("]"):
        return missing_parameter(path)
    fault = invalid_type if ", got `" in reason else invalid_value
    return fault(path, quoted(_in_json_words(reason[:1].lower() + reason[1:])))


def _in_json_words(reason: str) -> str:
    """Name types as JSON does: "`int | float | null`" is an "integer, number or null"."""
    return _TYPES.sub(lambda types: _listed(types[1].split(" | ")), reason)


def _listed(types: list[str]) -> str:
    *others, last = (_JSON_TYPES.get(name, name) for name in types)
    return f"{', '.join(others)} or {last}" if others else last


def check_token_limits(request: Any, *names: str) -> None:
    """Raises: ApiError for a limit that is no whole number."""
    for name in names:
        limit = getattr(request, name)
        if isinstance(limit, float) and not limit.is_integer():
            raise invalid_type(name, "expected a whole number")


def _check_messages(messages: list[ChatMessage]) -> None:
    for i, message in enumerate(messages):
        path = f"messages[{i}]"
        if message.role not in ROLES:
            known = ", ".join(ROLES)
            raise invalid_value(f"{path}.role", f"'{quoted(message.role)}' is not one of {known}")
        if message.tool_calls:
            raise invalid_value(f"{path}.tool_calls", "tool calls are not supported")
        if message.function_call is not None:
            raise invalid_value(f"{path}.function_call", "function calls are not supported")
        if message.content is None:
            raise missing_parameter(f"{path}.content")
        if isinstance(message.content, list):
            _check_parts(f"{path}.content", message.content)


def _check_parts(path: str, parts: list[ContentPart]) -> None:
    for j, part in enumerate(parts):
        if part.type != "text":
            raise invalid_value(
                f"{path}[{j}].type", f"'{quoted(part.type)}' is not supported; this model takes 'text' only"
            )
        if part.text is None:
            raise missing_parameter(f"{path}[{j}].text")


def _check_options(request: ChatRequest) -> None:
    if request.stream_options is not None and not request.streams:
        raise invalid_value("stream_options", "it is only allowed when 'stream' is true")
    if request.n is not None and request.n != 1:
        raise invalid_value("n", "only 1 is supported")
    for name, is_asked_for in _unsupported(request):
        if is_asked_for:
            raise invalid_value(name, "this is not supported")


def _unsupported(request: ChatRequest) -> tuple[tuple[str, bool], ...]:
    """Each parameter this server does not have, and whether the request asks for anything by it."""
    response_format = request.response_format
    return (
        ("response_format", response_format is not None and response_format.get("type") != "text"),
        ("logprobs", bool(request.logprobs)),
        ("top_logprobs", request.top_logprobs is not None),
        ("tools", bool(request.tools)),
        ("tool_choice", request.tool_choice not in (None, "none")),
        ("functions", bool(request.functions)),
        ("function_call", request.function_call not in (None, "none")),
        ("audio", request.audio is not None),
        ("modalities", request.modalities not in (None, [], ["text"])),
        ("logit_bias", bool(request.logit_bias)),
    )
