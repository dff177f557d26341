"""Answers of untrusted web servers: over http and https alone, each with a floor of speed and a total time."""

from __future__ import annotations

import base64
import http.client
import io
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any
from urllib.parse import unquote_to_bytes, urlsplit

from tessera.utils.errors import UserError
from tessera.utils.text import one_line

_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_LONGEST_ADDRESS = 4096
_LONGEST_PAUSE_S = 30.0
_BLOCK = 1 << 20
_HEADERS = {"User-Agent": "tessera", "Accept-Encoding": "identity"}


class TransientError(Exception):
    """A failure that may pass: try again."""


class TooSlowError(TransientError, TimeoutError):
    """The server sends, but slower than it must."""


@dataclass(frozen=True)
class NetworkLimits:
    """When a server is given up.

    Attributes:
        attempts: tries in a row that bring nothing new.
        pause_s: before the second try; it doubles with each further one, up to 30 s.
        timeout_s: longest silence.
        least_speed: bytes a second; a server that stays below it for `slack_s` counts as one that sends nothing new,
            and `slack_s` beyond the time that the file takes at this speed, it is given up.
        slack_s: see there.
    """

    attempts: int = 3
    pause_s: float = 1.0
    timeout_s: float = 30.0
    least_speed: float = 16384.0
    slack_s: float = 60.0

    def wait(self, failures: int) -> None:
        """Pause after so many failures in a row."""
        time.sleep(min(self.pause_s * 2 ** (failures - 1), _LONGEST_PAUSE_S))


LIMITS = NetworkLimits()


@dataclass
class Pace:
    """How slowly the answers to one download may come: see NetworkLimits."""

    limits: NetworkLimits = field(default_factory=lambda: LIMITS)
    _started: float = field(default_factory=time.monotonic)
    _needed_by: float = 0.0
    _end: float = 0.0

    def start(self, size: int) -> None:
        """A request is sent; the file has at most `size` bytes."""
        self._needed_by = time.monotonic() + self.limits.slack_s
        self.expect(size)

    def expect(self, size: int) -> None:
        """The file has `size` bytes."""
        self._end = self._started + self.limits.slack_s + size / self.limits.least_speed

    @property
    def is_over(self) -> bool:
        """Whether there is no time left for another request."""
        return time.monotonic() >= self._end

    def received(self, size: int) -> None:
        """So many bytes have come."""
        needed_by = self._needed_by + size / self.limits.least_speed
        self._needed_by = min(needed_by, time.monotonic() + self.limits.slack_s)

    def seconds_left(self) -> float:
        """How long the next bytes may take.

        Raises:
            TooSlowError: they should have been here.
        """
        left = min(self._needed_by, self._end) - time.monotonic()
        if left <= 0:
            raise TooSlowError(f"it sends less than {self.limits.least_speed:,.0f} bytes a second")
        return min(left, self.limits.timeout_s)


class _Paced(io.RawIOBase):
    """What a socket receives: header lines, chunk sizes and content alike."""

    def __init__(self, sock: socket.socket, pace: Pace) -> None:
        self._sock, self._pace = sock, pace
        self._file = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(self._pace.seconds_left())
        try:
            count = self._file.readinto(buffer) or 0
        except TimeoutError:
            self._pace.seconds_left()  # too slow, or silent?
            raise
        self._pace.received(count)
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _connection(kind: type[http.client.HTTPConnection], pace: Pace) -> type[http.client.HTTPConnection]:
    """A kind of connection whose answers keep to `pace`."""

    class Response(http.client.HTTPResponse):
        def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
            super().__init__(sock, *args, **kwargs)
            self.fp.close()
            self.fp = io.BufferedReader(_Paced(sock, pace))

    return type("Connection", (kind,), {"response_class": Response})


class _Http(urllib.request.HTTPHandler):
    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._kind = _connection(http.client.HTTPConnection, pace)

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._kind, req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._kind = _connection(http.client.HTTPSConnection, pace)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._kind, req)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follow redirects to http and https only, and never from https to http."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        allowed = ("https",) if req.type == "https" else ("http", "https")
        check_address(newurl, f"Cannot download {one_line(req.full_url, 200)}: it redirects to")
        if urlsplit(newurl).scheme not in allowed:
            raise UserError(
                f"Cannot download {one_line(req.full_url, 200)}: it redirects to '{one_line(newurl, 100)}', which is "
                f"not {allowed[0]}."
            )
        fp.close()  # urllib would read what comes with it, whatever its size
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def without_password(address: str) -> str:
    """An address as it may be printed and written down."""
    try:
        parts = urlsplit(address)
        password = parts.password
    except ValueError:  # not an address; nothing will be read from it
        return address
    if password is None:
        return address
    account, _, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{account.partition(':')[0]}:***@{host}").geturl()


def shown_address(address: str) -> str:
    """An address as messages name it."""
    return one_line(without_password(address), 200)


def check_address(url: str, what: str) -> None:
    """Make sure that `url` is an address that can be asked for.

    Args:
        url: the address.
        what: how the message starts, such as "Cannot download".

    Raises:
        UserError: it is none, or longer than any.
    """
    said = f"{what} '{one_line(without_password(url), 100)}'"
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname)
        usable = url.isascii() and url.isprintable() and " " not in url and (parts.port is None or parts.port > 0)
        (parts.hostname or "").encode("idna")
    except ValueError as error:
        raise UserError(f"{said}: not an address ({one_line(str(error), 80)}).") from error
    if not known:
        raise UserError(f"{said}: expected an address that starts with http:// or https://.")
    if not usable or len(url) > _LONGEST_ADDRESS:
        raise UserError(
            f"{said}: expected an address of at most {_LONGEST_ADDRESS:,} characters, blanks and letters beyond ASCII "
            "as %20 and the like."
        )


def open_address(url: str, pace: Pace, headers: Mapping[str, str] | None = None) -> Any:
    """The response of a server; an account in the address is not sent where it redirects to.

    Args:
        url: http or https.
        pace: of this download.
        headers: further ones of the request.

    Raises:
        TransientError: trying again may help.
        UserError: it will not.
    """
    parts = urlsplit(url)
    account, _, host = parts.netloc.rpartition("@")
    bare = parts._replace(netloc=host, fragment="").geturl()
    request = urllib.request.Request(bare, headers={**_HEADERS, **(headers or {})})
    if account:
        coded = base64.b64encode(unquote_to_bytes(account)).decode("ascii")
        request.add_unredirected_header("Authorization", f"Basic {coded}")
    return _open(request, pace)


def stated_length(headers: http.client.HTTPMessage) -> int | None:
    """How many bytes an answer has; None where it does not say."""
    length = headers.get("Content-Length", "")
    return int(length) if length.isascii() and length.isdecimal() and len(length) < 19 else None


def read_blocks(response: Any, url: str, total: int | None, most: int, offset: int = 0) -> Iterator[bytes]:
    """What comes, block by block, as soon as any has come, so that a slow server is found out.

    Args:
        response: of `open_address`.
        url: what was asked for.
        total: bytes of the whole file; None = unknown.
        most: bytes that it may have.
        offset: bytes of it that were there before.

    Raises:
        TransientError: the connection broke, or ended too early.
        UserError: there are more than `most`.
    """
    received, stated = offset, total or 0
    while True:
        if max(received, stated) > most:
            found = f"{stated:,} bytes, more" if stated > most else "more"
            raise UserError(f"Cannot download {shown_address(url)}: it has {found} than the limit of {most:,} bytes.")
        try:
            block = response.read1(_BLOCK)
        except (OSError, http.client.HTTPException) as error:
            raise _broken(error) from error
        if not block:
            break
        received += len(block)
        yield block
    if total is not None and received != total:
        raise TransientError(f"the connection ended after {received:,} of {total:,} bytes")


def _open(request: urllib.request.Request, pace: Pace) -> Any:
    url = one_line(request.full_url, 200)
    try:
        return _opener(pace).open(request, timeout=pace.seconds_left())
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and request.has_header("Range"):  # the file has become shorter: ask for all of it
            request.remove_header("Range")
            request.remove_header("If-range")
            return _open(request, pace)
        said = f"the server answered {error.code} {one_line(str(error.reason), 100)}"
        if error.code in _TRANSIENT_STATUS:
            raise TransientError(said) from error
        advice = (
            "Check the address" if error.code in (404, 410) else "The server refuses; check the address and your access"
        )
        raise UserError(f"Cannot download {url}: {said}. {advice}.") from error
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            raise UserError(
                f"Cannot download {url}: its certificate is not valid ({error.reason.verify_message}). Check the clock "
                "and the certificates of this machine."
            ) from error
        if isinstance(error.reason, TransientError):
            raise error.reason from error
        raise TransientError(one_line(str(error.reason), 100)) from error
    except (OSError, http.client.HTTPException) as error:
        raise _broken(error) from error
    except UserError:
        raise
    except ValueError as error:  # an address, redirected to or the proxy's, that urllib does not understand
        raise UserError(f"Cannot download {url}: {one_line(str(error), 100)}. Check the address.") from error


def _broken(error: Exception) -> TransientError:
    """What to raise for an error of the connection."""
    if isinstance(error, TransientError):
        return error
    return TransientError(f"the connection broke ({one_line(str(error) or type(error).__name__, 100)})")


def _opener(pace: Pace) -> urllib.request.OpenerDirector:
    """An opener without the file:, ftp: and data: schemes that urllib's default one accepts."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        _Http(pace),
        _Https(pace),
        _Redirects(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener
