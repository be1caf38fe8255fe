"""TLS contexts of every listener and dial, and how they follow their certificate files.

`LiveContext` owns the context that new handshakes use: renewed files are tried in a scratch context first,
and what is half written or does not fit leaves the last good one in place. Connections that stand are not
touched. No sockets here. Called by: the command lines, which own the signals; the public and the control
listener; the worker's dial.
"""

import asyncio
import logging
import os
import ssl
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Never, TypeAlias

from llm_ingress.certs import (
    CertificateFacts,
    CertificateFiles,
    Role,
    Stamp,
    check_end,
    diagnose,
    expiry_warning,
    read_facts,
)
from llm_ingress.errors import CertificateFault

logger = logging.getLogger(__name__)

POLL_S = 15.0  # renewed files are used after so long at most, without a signal
ALPN = ("h2", "http/1.1")

_WRONG_PURPOSE = 26  # X509_V_ERR_INVALID_PURPOSE
_NAME_MISMATCH = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH, ..._IP_ADDRESS_MISMATCH
_REFUSALS = {  # Source: x509_vfy.h, X509_V_ERR_*
    7: "its certificate was forged: the CA's signature is wrong",
    9: "its certificate is not yet valid, or this machine's clock is behind",
    10: "its certificate has expired, or this machine's clock is ahead",
    **dict.fromkeys((2, 18, 19, 20, 21), "its certificate is of another CA than the one given here"),
    _WRONG_PURPOSE: "its certificate is not that of an ingress",
}
_HUNG_UP = (
    "it closed the connection instead of answering, as an ingress does when it does not accept this worker's "
    "certificate (another CA, or expired by its clock), or when it goes away"
)

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

    def __init__(
        self, build: Build, files: CertificateFiles, now: datetime, *, keeps_names: bool = False
    ) -> None:
        """Load the files, and log what expires soon. Raises: CertificateFault.

        With `keeps_names` a renewed certificate must have the names of the first: a process that runs as one
        worker does not become another.
        """
        self._build = build
        self._files = files
        self._keeps_names = keeps_names
        self._facts: CertificateFacts | None = None  # of the certificate in use
        self._seen: Stamp = files.stamp()
        self._complaint: str | None = None
        self._current = self._load(now)

    @property
    def current(self) -> ssl.SSLContext:
        """The newest good context."""
        return self._current

    def for_dial(self, now: datetime) -> ssl.SSLContext:
        """Return the newest good context, for one dial.

        Raises: CertificateFault once it has expired: the other side would hang up without a word.
        """
        if self._facts is not None:
            check_end(self._files.cert, self._facts.not_after, now)
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
        facts = read_facts(self._files.cert)
        if self._keeps_names and self._facts is not None and facts.names != self._facts.names:
            raise CertificateFault(
                f"{self._files.cert}: is {', '.join(facts.names)}, and this process runs as "
                f"{', '.join(self._facts.names)}"
            )
        self._facts = facts
        for path in (self._files.cert, self._files.ca):
            if path is not None and (warning := expiry_warning(path, now)) is not None:
                logger.warning("%s", warning)
        return fresh


def explain(error: BaseException) -> str:
    """Return in a few words why a dial failed: of the other side, whose address the caller knows.

    A client library's own exceptions are looked behind. With TLS 1.3 a refused client hears of it only after
    its handshake is complete, and mostly as a closed connection.
    """
    match _root_cause(error):
        case ssl.SSLCertVerificationError(verify_code=code, verify_message=message):
            if code in _NAME_MISMATCH:
                return f"its certificate is for another name: {message.rstrip('.')}"
            return _REFUSALS.get(code, f"its certificate is refused: {message}")
        case ssl.SSLError(reason=str(reason)) if "_ALERT_" in reason:
            return f"it refused this worker: {_alert(reason)}"
        case ssl.SSLEOFError() | ConnectionResetError() | BrokenPipeError():
            return _HUNG_UP
        case ssl.SSLError() as fault:
            return f"it does not speak TLS 1.3: {fault.reason}"
        case TimeoutError():
            return "unreachable: no answer in time"
        case OSError() as fault:
            return f"unreachable: {_strerror(fault)}"
    return _HUNG_UP


def explain_refusal(error: ssl.SSLError) -> str:
    """Return in a few words why a handshake with whoever dialled the control listener failed."""
    match error:
        case ssl.SSLCertVerificationError(verify_code=code, verify_message=message):
            refusals = {**_REFUSALS, _WRONG_PURPOSE: "its certificate is not that of a worker"}
            return refusals.get(code, f"its certificate is refused: {message}")
        case ssl.SSLError(reason=str(reason)) if "_ALERT_" in reason:
            return f"it does not accept this ingress's certificate: {_alert(reason)}"
    return f"it does not speak TLS 1.3 with a certificate: {_in_words(error.reason or 'NO_REASON')}"


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


def _alert(reason: str) -> str:
    """Return the words of a TLS alert in OpenSSL's name for it."""
    return _in_words(reason.partition("_ALERT_")[2])


def _in_words(name: str) -> str:
    return name.replace("_", " ").lower()


def _root_cause(error: BaseException) -> BaseException:
    # What a timeout cut short is its cause, and says nothing.
    while error.__cause__ is not None and not isinstance(error, TimeoutError):
        error = error.__cause__
    return error


def _strerror(error: OSError) -> str:
    """Return the system's word for it; asyncio puts its own there. A resolver's numbers are negative."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error)


def _no_password() -> bytes:
    """Without it OpenSSL would ask on the terminal."""
    return b""
