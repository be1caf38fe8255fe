"""Keeps a TLS connection small: asyncio gives each one a read buffer of 256 KiB, for as long as it is open.

Thousands of parked requests would hold gigabytes that way. A TLS record has at most 16 KiB, and a buffer of
that size is filled and emptied as often as there are records; what is read does not change.

The only module that reaches into asyncio. Called by: `serving.py`, once, before it serves.
"""

from asyncio.sslproto import SSLProtocol

READ_BUFFER_BYTES = 16 * 1024


def install() -> None:
    """Give connections made from now on, of the whole process, the small buffer.

    Source: asyncio/sslproto.py, SSLProtocol.max_size: the buffer's size, and the most read in one piece.
    """
    SSLProtocol.max_size = READ_BUFFER_BYTES
