"""Text that one end of the ring chooses and the other logs: what may be a name, and how the rest is shown.

Pure. Called by: `payloads.py` and `control.py`; the worker, for its flags and what an ingress says.
"""

from typing import Final

MAX_LABEL_CHARS: Final = 256
MAX_SHOWN_CHARS: Final = 500


def is_label(text: str) -> bool:
    """Whether it may be a name in logs and metrics: 1 to 256 characters, each of which can be seen."""
    return 0 < len(text) <= MAX_LABEL_CHARS and text.isprintable()


def shown(text: str) -> str:
    """Return a peer's text as one line of a log may show it: shortened, and codes for what cannot be seen."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text[:MAX_SHOWN_CHARS])
