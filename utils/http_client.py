"""HTTP GET for untrusted servers, based on urllib3: http and https only, limited in size and time of each read."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from tessera.utils.errors import UserError
from tessera.utils.text import one_line

if TYPE_CHECKING:  # importing urllib3 opens a socket to check for IPv6: only requests import it
    from urllib3 import BaseHTTPResponse, PoolManager

_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_LONGEST_ADDRESS = 4096
_MOST_REDIRECTS = 10
_LONGEST_PAUSE_S = 30.0
_BLOCK = 1 << 20


class TransientError(Exception):
    """Error that a retry may fix."""


@dataclass(frozen=True)
class NetworkLimits:
    """Limits for slow or failing servers."""

    attempts: int = 3  # consecutive attempts without progress
    pause_s: float = 1.0  # before the first retry; doubles with each one, up to 30 s
    timeout_s: float = 30.0  # of connecting and of each read

    def wait(self, failures: int) -> None:
        """Sleep after consecutive failures."""
        time.sleep(min(self.pause_s * 2 ** (failures - 1), _LONGEST_PAUSE_S))


LIMITS = NetworkLimits()


def redacted(address: str) -> str:
    """Return an address without its password."""
    try:
        parts = urlsplit(address)
        password = parts.password
    except ValueError:  # not an address
        return address
    if password is None:
        return address
    account, _, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{account.partition(':')[0]}:***@{host}").geturl()


def redacted_address(address: str) -> str:
    """Return an address as messages name it."""
    return one_line(redacted(address), 200)


def check_address(url: str, what: str) -> None:
    """Raise a UserError unless `url` is a usable address; messages start with `what`, as in "Cannot download"."""
    message = f"{what} '{one_line(redacted(url), 100)}'"
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname)
        usable = url.isascii() and url.isprintable() and " " not in url and (parts.port is None or parts.port > 0)
        (parts.hostname or "").encode("idna")
    except ValueError as error:
        raise UserError(f"{message}: not an address ({one_line(str(error), 80)}).") from error
    if not known:
        raise UserError(f"{message}: expected an address that starts with http:// or https://.")
    if not usable or len(url) > _LONGEST_ADDRESS:
        raise UserError(
            f"{message}: expected an address of at most {_LONGEST_ADDRESS:,} characters. Percent-encode blanks and "
            "non-ASCII characters."
        )


def open_address(url: str, headers: Mapping[str, str] | None = None) -> BaseHTTPResponse:
    """Send a GET request and return the response, to be closed; credentials are not sent to redirect targets.

    Raises:
        TransientError: a retry may succeed.
        UserError: a retry will not.
    """
    from urllib3 import Retry, Timeout, make_headers
    from urllib3.exceptions import HTTPError, LocationValueError, MaxRetryError, ResponseError, SSLError

    parts = urlsplit(url)
    account, _, host = parts.netloc.rpartition("@")
    sent = {"User-Agent": "tessera", "Accept-Encoding": "identity", **(headers or {})}
    sent |= make_headers(basic_auth=unquote(account)) if account else {}
    message = f"Cannot download {redacted_address(url)}"
    try:
        response = _pool(url).request(
            "GET",
            parts._replace(netloc=host, fragment="").geturl(),
            headers=sent,
            timeout=Timeout(connect=LIMITS.timeout_s, read=LIMITS.timeout_s),
            retries=Retry(total=None, connect=0, read=0, status=0, other=0, redirect=_MOST_REDIRECTS),
            preload_content=False,
            decode_content=False,
            enforce_content_length=False,
        )
    except MaxRetryError as error:
        reason = error.reason or error
        if isinstance(reason, SSLError):
            text = f"{one_line(str(reason), 200)}. Check the clock and the certificates of this machine."
            raise UserError(f"{message}: {text}") from error
        if isinstance(reason, ResponseError):
            raise UserError(f"{message}: it redirects more than {_MOST_REDIRECTS} times. Check the address.") from error
        raise _connection_error(reason) from error
    except (LocationValueError, ValueError) as error:  # of urllib3 and idna
        raise UserError(f"{message}: it redirects to no address ({one_line(str(error), 100)}).") from error
    except (HTTPError, OSError) as error:
        raise _connection_error(error) from error
    try:
        _check_response(response, message, is_https=url.startswith("https:"))
    except BaseException:
        response.close()
        raise
    return response


def _check_response(response: BaseHTTPResponse, message: str, *, is_https: bool) -> None:
    """Raise unless a response has the content, as it is, or refuses the range."""
    for step in response.retries.history if response.retries else ():
        if is_https and (step.redirect_location or "").startswith("http:"):
            raise UserError(
                f"{message}: it redirects to '{one_line(step.redirect_location or '', 100)}', which is not https."
            )
    if response.status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE):
        answer = f"the server answered {response.status} {one_line(str(response.reason), 100)}"
        if response.status in _TRANSIENT_STATUS:
            raise TransientError(answer)
        raise UserError(f"{message}: {answer}. Check the address and your access.")
    encoding = one_line(response.headers.get("Content-Encoding", "identity"), 50).strip().lower()
    # aws-chunked is left over from an upload; some servers say gzip of a .gz file, whose bytes these are.
    is_gzip_file = encoding in ("gzip", "x-gzip") and message.partition("?")[0].endswith((".gz", ".tgz"))
    if encoding not in ("", "identity", "aws-chunked") and not is_gzip_file:
        raise UserError(
            f"{message}: the server sends it encoded ({encoding}), expected identity, as requested. Download the file "
            "by other means."
        )


def stated_length(response: BaseHTTPResponse) -> int | None:
    """Return the Content-Length of a response; None if it is missing."""
    length = response.headers.get("Content-Length", "")
    return int(length) if length.isascii() and length.isdecimal() and len(length) < 19 else None


def read_blocks(response: BaseHTTPResponse, url: str, total: int | None, most: int, offset: int = 0) -> Iterator[bytes]:
    """Yield the content of a response to `open_address` in blocks as they arrive, after `offset` received before.

    The whole file has `total` bytes, None = unknown, and at most `most`.

    Raises:
        TransientError: the connection broke, ended early, or timed out.
        UserError: the size exceeds `most`.
    """
    from urllib3.exceptions import HTTPError

    received, stated = offset, total or 0
    while True:
        if max(received, stated) > most:
            found = f"{stated:,} bytes, more" if stated > most else "more"
            raise UserError(
                f"Cannot download {redacted_address(url)}: it has {found} than the limit of {most:,} bytes."
            )
        try:
            block = response.read1(_BLOCK)
        except (HTTPError, OSError) as error:
            raise _connection_error(error) from error
        if not block:
            break
        received += len(block)
        yield block
    if total is not None and received != total:
        raise TransientError(f"the connection ended after {received:,} of {total:,} bytes")


def _pool(url: str) -> PoolManager:
    """Return a connection pool, with the proxy that the environment sets."""
    from urllib3 import PoolManager, ProxyManager, make_headers

    parts = urlsplit(url)
    proxy = None if urllib.request.proxy_bypass(parts.netloc) else urllib.request.getproxies().get(parts.scheme)
    if not proxy:
        return PoolManager()
    account = urlsplit(proxy).netloc.rpartition("@")[0]
    return ProxyManager(proxy, proxy_headers=make_headers(proxy_basic_auth=unquote(account)) if account else {})


def _connection_error(error: Exception) -> TransientError:
    return TransientError(f"the connection broke ({one_line(str(error) or type(error).__name__, 100)})")
