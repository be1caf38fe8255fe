"""What a request says its body is: JSON in UTF-8, not compressed, or it is refused before it is read.

A body in another encoding would be answered as broken JSON, which says nothing. Pure.
Called by: `exchange.py`.
"""

from collections.abc import Iterable

from llm_ingress.api.errors import unsupported_charset, unsupported_coding, wrong_content_type

CHARSETS = ("utf-8", "utf8", "us-ascii")  # the last is part of the first


def check_media(content_type: str | None, content_encodings: Iterable[str]) -> None:
    """Raises: ApiError for anything but JSON as it is; a body that says nothing of itself is taken."""
    if content_type is not None:
        _check_type(content_type)
    for coding in ",".join(content_encodings).split(","):
        if coding.strip().lower() not in ("", "identity"):
            raise unsupported_coding(coding.strip())


def _check_type(content_type: str) -> None:
    media_type, *parameters = content_type.split(";")
    media_type = media_type.strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise wrong_content_type(content_type)
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        charset = value.strip().strip('"')
        if name.strip().lower() == "charset" and charset.lower() not in CHARSETS:
            raise unsupported_charset(charset)
