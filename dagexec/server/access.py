"""Who may ask: a token that clients send, and certificates. Both are read again, for as long as the server runs.

What is in the place of files that cannot be used, because they are being replaced perhaps, is what was read last.
"""

from __future__ import annotations

import hmac
import logging
import ssl
from pathlib import Path

from dagexec.errors import SettingError
from dagexec.platform.records import dataclass
from dagexec.server.inference import RequestError

logger = logging.getLogger("dagexec.server")


@dataclass(frozen=True)
class Certificates:
    """Those of a server with TLS: files in PEM.

    Attributes:
        certificate: its own, with those that it was signed by.
        private_key: that of the certificate.
        client_certificates: of authorities that sign clients' certificates, which all clients then need to have.
    """

    certificate: Path
    private_key: Path
    client_certificates: Path | None

    def read(self) -> CertificateContents:
        """What the files have now. Raises OSError."""
        authorities = self.client_certificates
        return CertificateContents(
            self.certificate.read_bytes(),
            self.private_key.read_bytes(),
            None if authorities is None else authorities.read_bytes(),
        )

    def context(self) -> ssl.SSLContext:
        """For a server. Raises OSError for files that cannot be read, have no certificates, or do not fit."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.private_key)
        if self.client_certificates is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.client_certificates)
        return context


@dataclass(frozen=True)
class CertificateContents:
    """The contents of the files that `Certificates` names."""

    certificate: bytes
    private_key: bytes
    client_certificates: bytes | None


class Tls:
    """The certificates of a server, as they were when they could last be used.

    Attributes:
        context: for connections that begin now.
        contents: of the files.
    """

    def __init__(self, certificates: Certificates) -> None:
        """Raises SettingError for certificates that cannot be used."""
        self._certificates = certificates
        self._problem = ""
        self.contents, self.context = self._read()

    def read_again(self) -> bool:
        """Whether there are other certificates than before, which can be used."""
        try:
            if self._certificates.read() == self.contents:
                return False
            self.contents, self.context = self._read()
        except (OSError, SettingError) as error:
            self._problem = _warn(str(error), self._problem)
            return False
        self._problem = ""
        logger.info("there are new certificates")
        return True

    def _read(self) -> tuple[CertificateContents, ssl.SSLContext]:
        try:
            return self._certificates.read(), self._certificates.context()
        except OSError as error:
            raise SettingError(f"certificates: {error}") from error


class Access:
    """Whether a request is let in."""

    def __init__(self, token_file: Path | None = None) -> None:
        """Lets in those who send the token in the file, without white space around it; None lets everybody in.

        Raises SettingError.
        """
        self._file = token_file
        self._problem = ""
        self._expected = None if token_file is None else _expected(token_file)

    def check(self, authorization: bytes | None) -> None:
        """Raise RequestError (401) unless this header of a request has the token; how long it takes tells nothing."""
        if self._expected is not None and not hmac.compare_digest(authorization or b"", self._expected):
            raise RequestError(401, "this server wants a token: Authorization: Bearer TOKEN")

    def read_again(self) -> None:
        """Ask for the token that the file has now."""
        if self._file is None:
            return
        try:
            expected = _expected(self._file)
        except SettingError as error:
            self._problem = _warn(str(error), self._problem)
            return
        self._problem = ""
        if expected != self._expected:
            self._expected = expected
            logger.info("there is a new token")


OPEN = Access()
"""Everybody may ask."""


def _expected(token_file: Path) -> bytes:
    """The header that has the token. Raises SettingError."""
    try:
        token = token_file.read_bytes().strip()
    except OSError as error:
        raise SettingError(f"token_file: {error}") from error
    if not token or not all(33 <= byte < 127 for byte in token):
        raise SettingError(f"token_file {token_file}: a token is of visible characters of ASCII")
    return b"Bearer " + token


def _warn(problem: str, before: str) -> str:
    """Say it once, however often it is found."""
    if problem != before:
        logger.warning("%s; what was read before stays in use", problem)
    return problem
