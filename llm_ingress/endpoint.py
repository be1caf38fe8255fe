"""Where something listens or is dialled, as people write it: HOST:PORT, with an IPv6 address in brackets.

Called by: the command lines of both ends.
"""

from dataclasses import dataclass

from llm_ingress.errors import ConfigError

PORT_MAX = 65535


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoint(text: str, *, default_port: int | None = None) -> Endpoint:
    """Return what HOST:PORT means; the port may be left out where there is a default.

    Raises: ConfigError.
    """
    host, separator, port = _split(text)
    if not host or (not separator and default_port is None):
        raise ConfigError(f"{text!r} is not HOST:PORT")
    if not separator:
        assert default_port is not None, "checked above"
        return Endpoint(host, default_port)
    if not (port.isascii() and port.isdigit() and int(port) <= PORT_MAX):
        raise ConfigError(f"{text!r} has the port {port!r}, must be 0 to {PORT_MAX}")
    return Endpoint(host, int(port))


def _split(text: str) -> tuple[str, str, str]:
    """Return host, the colon if there is one, and port."""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        return host, rest[:1], rest[1:]
    return text.rpartition(":") if ":" in text else (text, "", "")
