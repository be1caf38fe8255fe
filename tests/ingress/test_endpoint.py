"""HOST:PORT, as people write it."""

import pytest

from llm_ingress.endpoint import Endpoint, parse_endpoint
from llm_ingress.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("127.0.0.1:8444", Endpoint("127.0.0.1", 8444)),
        ("host.example:0", Endpoint("host.example", 0)),
        ("[::1]:8444", Endpoint("::1", 8444)),
    ],
)
def test_it_reads_what_it_writes(text: str, endpoint: Endpoint) -> None:
    assert parse_endpoint(text) == endpoint
    assert str(endpoint) == text


@pytest.mark.parametrize("text", ["host", "[::1]"])
def test_a_port_may_be_left_out_where_there_is_a_default(text: str) -> None:
    assert parse_endpoint(text, default_port=1).port == 1
    with pytest.raises(ConfigError, match="is not HOST:PORT"):
        parse_endpoint(text)


@pytest.mark.parametrize(
    "text", ["", ":1", "host:", "host:x", "host:65536", "[::1]x", "[]:1", "::1", "a b:1", "a\n:1", "[: :]:1"]
)
def test_anything_else_is_named(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_endpoint(text, default_port=8444)
