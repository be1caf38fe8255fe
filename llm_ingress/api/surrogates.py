"""Half a surrogate pair in a JSON body: `"\\ud83d"`, an emoji cut in two by whoever cut the text.

The escape is JSON by its grammar and no text by any, so a parser gives up on it, each in words of its own.
Asked only once a body was found bad; two passes of the regex engine, however long the body is. Pure.
Called by: `schemas.py`.
"""

import re
from typing import NamedTuple

# Characters of a string as far as they are text: an escape of a surrogate counts only as a whole pair.
_TEXT = (
    rb'(?:[^"\\]++|\\[^u]|\\u(?![dD][89a-fA-F])'
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+"
)
_SOUND = re.compile(rb'(?:[^"]++|"' + _TEXT + rb'")*+')
_HALF = re.compile(rb'"' + _TEXT + rb"(?P<escape>\\u[dD][89a-fA-F][0-9a-fA-F]{2})")


class HalfPair(NamedTuple):
    """The first one in a body: its escape, and where its string begins. Units: bytes."""

    escape: str
    string_at: int


def find_half_pair(body: bytes) -> HalfPair | None:
    """Return the first half of a surrogate pair that is without its other half, if there is one."""
    sound = _SOUND.match(body)
    assert sound is not None, "it matches nothing at least"
    half = _HALF.match(body, sound.end())
    return None if half is None else HalfPair(half["escape"].decode(), sound.end())
