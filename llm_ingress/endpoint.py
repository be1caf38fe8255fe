"""Where something listens or is dialled, as people write it: HOST:PORT, with an IPv6 address in brackets.

Called by: the command lines of both ends.
"""

import re
from dataclasses import dataclass

from llm_ingress.errors import ConfigError

PORT_MAX = 65535

_ENDPOINT = re.compile(r"(?:\[(?P<address>[^\[\]\s]+)\]|(?P<name>[^\[\]:\s]+))(?::(?P<port>[^:]*))?")


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
    match = _ENDPOINT.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} is not HOST:PORT")
    host, port = match["address"] or match["name"], match["port"]
    if port is None:
        if default_port is None:
            raise ConfigError(f"{text!r} is not HOST:PORT")
        return Endpoint(host, default_port)
    if not (port.isascii() and port.isdigit() and int(port) <= PORT_MAX):
        raise ConfigError(f"{text!r} has the port {port!r}, must be 0 to {PORT_MAX}")
    return Endpoint(host, int(port))
