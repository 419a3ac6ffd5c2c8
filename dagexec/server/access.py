"""Who may ask: a token that clients send, and certificates."""

from __future__ import annotations

import hmac
from pathlib import Path

from dagexec.errors import SettingError
from dagexec.platform.records import dataclass
from dagexec.server.inference import RequestError


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


class Access:
    """Whether a request is let in."""

    def __init__(self, token: bytes | None) -> None:
        """None lets everybody in."""
        self._expected = None if token is None else b"Bearer " + token

    def check(self, authorization: bytes | None) -> None:
        """Raise RequestError (401) unless this header of a request has the token; how long it takes tells nothing."""
        if self._expected is not None and not hmac.compare_digest(authorization or b"", self._expected):
            raise RequestError(401, "this server wants a token: Authorization: Bearer TOKEN")


OPEN = Access(None)
"""Everybody may ask."""


def access_by(token_file: Path | None) -> Access:
    """Of those who send the token in a file, without white space around it. Raises SettingError."""
    if token_file is None:
        return OPEN
    try:
        token = token_file.read_bytes().strip()
    except OSError as error:
        raise SettingError(f"token_file: {error}") from error
    if not token or not all(33 <= byte < 127 for byte in token):
        raise SettingError(f"token_file {token_file}: a token is of visible characters of ASCII")
    return Access(token)
