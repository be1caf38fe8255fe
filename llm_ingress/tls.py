"""TLS contexts of every listener and dial, and how they follow their certificate files.

`LiveContext` owns the context that new handshakes use: renewed files are tried in a scratch context first,
and what is half written or does not fit leaves the last good one in place. Connections that stand are not
touched. No sockets here. Called by: the command lines, which own the signals; the public and the control
listener; the worker's dial.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Never, TypeAlias

from llm_ingress.certs import (
    CertificateFiles,
    Role,
    Stamp,
    diagnose,
    expiry_warning,
)
from llm_ingress.errors import CertificateFault

logger = logging.getLogger(__name__)

POLL_S = 15.0  # renewed files are used after so long at most, without a signal
ALPN = ("h2", "http/1.1")

Build: TypeAlias = Callable[[CertificateFiles, datetime], ssl.SSLContext]


def control_context(files: CertificateFiles, now: datetime) -> ssl.SSLContext:
    """Return the control listener's context: TLS 1.3, and a client certificate of the private CA.

    Raises: CertificateFault that names the file at fault.
    """
    diagnose(files, Role.INGRESS, now)
    context = _context(ssl.PROTOCOL_TLS_SERVER, ssl.TLSVersion.TLSv1_3)
    context.verify_mode = ssl.CERT_REQUIRED
    # A resumed session would skip the certificate, and with it what was renewed or ran out meanwhile.
    context.num_tickets = 0
    _load(context, files)
    return context


def worker_context(files: CertificateFiles, now: datetime) -> ssl.SSLContext:
    """Return a worker's context for dialling: the ingress must have the name, and a certificate of the CA.

    Raises: CertificateFault that names the file at fault.
    """
    diagnose(files, Role.WORKER, now)
    context = _context(ssl.PROTOCOL_TLS_CLIENT, ssl.TLSVersion.TLSv1_3)
    context.hostname_checks_common_name = False
    _load(context, files)
    return context


def public_context(files: CertificateFiles, now: datetime) -> ssl.SSLContext:
    """Return the public listener's context: TLS 1.2 or 1.3, HTTP/1.1 or 2, no certificate of the client.

    Raises: CertificateFault that names the file at fault.
    """
    diagnose(files, None, now)
    context = _context(ssl.PROTOCOL_TLS_SERVER, ssl.TLSVersion.TLSv1_2)
    context.set_ciphers("ECDHE+AESGCM:ECDHE+CHACHA20")  # TLS 1.2: what HTTP/2 allows; 1.3 has its own
    context.set_alpn_protocols(ALPN)
    _load(context, files)
    return context


class LiveContext:
    """The context that new handshakes use, made anew when its files change.

    Thread: event loop, or wherever its one owner lives.
    """

    def __init__(self, build: Build, files: CertificateFiles, now: datetime) -> None:
        """Load the files, and log what expires soon. Raises: CertificateFault."""
        self._build = build
        self._files = files
        self._seen: Stamp = files.stamp()
        self._complaint: str | None = None
        self._current = self._load(now)

    @property
    def current(self) -> ssl.SSLContext:
        """The newest good context: a dial takes it each time."""
        return self._current

    def for_listener(self) -> ssl.SSLContext:
        """Return a context for a listener's whole life, which hands each handshake over to the newest one."""
        front = self._current
        front.sni_callback = self._hand_over
        return front

    def poll(self, now: datetime) -> None:
        """Load the files again if they changed."""
        if self._files.stamp() != self._seen:
            self.reload(now)

    def reload(self, now: datetime) -> None:
        """Load the files again; keep the last good context if they cannot be used, and say so once."""
        # Before they are read: what is written meanwhile then differs from it, and is read again.
        self._seen = self._files.stamp()
        try:
            self._current = self._load(now)
        except CertificateFault as fault:
            self._complain(str(fault))
        else:
            self._complaint = None
            logger.info("%s is used for new connections", self._files.cert)

    def _hand_over(self, connection: ssl.SSLObject, _name: str | None, _front: ssl.SSLContext) -> None:
        """Source: ssl.SSLContext.sni_callback; it is called too where the client names no server."""
        connection.context = self._current

    def _complain(self, fault: str) -> None:
        if fault != self._complaint:
            logger.warning("the last good certificate stays in use: %s", fault)
            self._complaint = fault

    def _load(self, now: datetime) -> ssl.SSLContext:
        """Return a fresh context, and log what of it expires soon. Raises: CertificateFault."""
        fresh = self._build(self._files, now)
        for path in (self._files.cert, self._files.ca):
            if path is not None and (warning := expiry_warning(path, now)) is not None:
                logger.warning("%s", warning)
        return fresh


async def follow(contexts: Iterable[LiveContext]) -> Never:
    """Keep contexts in step with their files, until cancelled."""
    followed = tuple(contexts)
    while True:
        await asyncio.sleep(POLL_S)
        for context in followed:
            try:
                context.poll(datetime.now(UTC))
            except Exception:
                logger.exception("looking for renewed certificates failed")


def _context(protocol: int, minimum: ssl.TLSVersion) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = minimum
    context.options |= ssl.OP_NO_COMPRESSION
    return context


def _load(context: ssl.SSLContext, files: CertificateFiles) -> None:
    """Load what `diagnose` found good.

    Raises: CertificateFault if it was replaced since, or OpenSSL wants more.
    """
    try:
        context.load_cert_chain(files.cert, files.key, password=_no_password)
        if files.ca is not None:
            context.load_verify_locations(cafile=files.ca)
    except (ssl.SSLError, OSError) as error:
        raise CertificateFault(f"{files.cert}: cannot be loaded with its key and CA: {error}") from error


def _no_password() -> bytes:
    """Without it OpenSSL would ask on the terminal."""
    return b""
