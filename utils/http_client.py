"""HTTP client for untrusted servers, based on urllib3: http and https only, bounded in time and size."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urljoin, urlsplit

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
    head_s: float = 40.0  # of connecting, redirects and the head of a response together
    least_speed: float = 16384.0  # bytes a second
    slack_s: float = 60.0  # added to the time that `least_speed` allows

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
    answer: Future[BaseHTTPResponse] = Future()

    def ask() -> None:
        try:
            answer.set_result(_request(url, headers))
        except BaseException as error:
            answer.set_exception(error)

    # In a thread, as a server that sends a byte now and then exceeds no timeout of a socket.
    threading.Thread(target=ask, daemon=True).start()
    try:
        return answer.result(LIMITS.head_s)
    except TimeoutError as error:
        answer.add_done_callback(_close)
        raise TransientError(f"the head of the response is not there after {LIMITS.head_s:g} s") from error


def _close(late: Future[BaseHTTPResponse]) -> None:
    if late.exception() is None:
        late.result().close()


def _request(url: str, headers: Mapping[str, str] | None) -> BaseHTTPResponse:
    from urllib3 import Timeout, make_headers
    from urllib3.exceptions import HTTPError, SSLError

    parts = urlsplit(url)
    account, _, host = parts.netloc.rpartition("@")
    sent = {"User-Agent": "tessera", "Accept-Encoding": "identity", **(headers or {})}
    target, shown_url = parts._replace(netloc=host, fragment="").geturl(), redacted_address(url)
    how: dict[str, Any] = {
        "timeout": Timeout(connect=LIMITS.timeout_s, read=LIMITS.timeout_s),
        **dict.fromkeys(("redirect", "retries", "preload_content", "enforce_content_length", "decode_content"), False),
    }
    try:
        for number in range(_MOST_REDIRECTS):
            own = make_headers(basic_auth=unquote(account)) if account and number == 0 else {}
            response = _pool(target).request("GET", target, headers={**sent, **own}, **how)
            location = response.get_redirect_location()
            if not location:
                return _check_status(response, shown_url)
            response.close()
            target = _redirect_target(target, location, shown_url)
    except SSLError as error:
        raise UserError(
            f"Cannot download {shown_url}: {one_line(str(error), 200)}. Check the clock and the certificates of this "
            "machine."
        ) from error
    except (HTTPError, OSError) as error:
        raise _connection_error(error) from error
    raise UserError(f"Cannot download {shown_url}: it redirects more than {_MOST_REDIRECTS} times. Check the address.")


def stated_length(response: BaseHTTPResponse) -> int | None:
    """Return the Content-Length of a response; None if it is missing."""
    length = response.headers.get("Content-Length", "")
    return int(length) if length.isascii() and length.isdecimal() and len(length) < 19 else None


def read_blocks(response: BaseHTTPResponse, url: str, total: int | None, most: int, offset: int = 0) -> Iterator[bytes]:
    """Yield the content of a response to `open_address` in blocks as they arrive, after `offset` received before.

    The whole file has `total` bytes, None = unknown, and at most `most`.

    Raises:
        TransientError: the connection broke, ended early, or is too slow.
        UserError: the size exceeds `most`.
    """
    from urllib3.exceptions import HTTPError

    received, stated = offset, total or 0
    start = time.monotonic() + LIMITS.slack_s

    def left_s() -> float:
        return start + (received - offset) / LIMITS.least_speed - time.monotonic()

    with _ended_after(left_s, response):
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
            if left_s() < 0:
                raise TransientError(f"it sends less than {LIMITS.least_speed:,.0f} bytes a second")
            if not block:
                break
            received += len(block)
            yield block
    if total is not None and received != total:
        raise TransientError(f"the connection ended after {received:,} of {total:,} bytes")


@contextmanager
def _ended_after(left_s: Callable[[], float], response: BaseHTTPResponse) -> Iterator[None]:
    """End a read that is still waiting when `left_s` is 0; one of a line, as a chunk's length, has no timeout."""
    over = threading.Event()

    def watch() -> None:
        while (left := left_s()) > 0:
            if over.wait(left):
                return
        with suppress(OSError, RuntimeError, ValueError):  # it has ended by itself
            response.shutdown()

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _pool(url: str) -> PoolManager:
    """Return a connection pool, with the proxy that the environment sets."""
    from urllib3 import PoolManager, ProxyManager, make_headers

    parts = urlsplit(url)
    proxy = None if urllib.request.proxy_bypass(parts.netloc) else urllib.request.getproxies().get(parts.scheme)
    if not proxy:
        return PoolManager()
    account = urlsplit(proxy).netloc.rpartition("@")[0]
    return ProxyManager(proxy, proxy_headers=make_headers(proxy_basic_auth=unquote(account)) if account else {})


def _check_status(response: BaseHTTPResponse, shown_url: str) -> BaseHTTPResponse:
    """Return the response if it has the content, as it is, or refuses the range; else raise."""
    if response.status in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE):
        encoding = one_line(response.headers.get("Content-Encoding", "identity"), 50).strip().lower()
        if encoding in ("", "identity", "aws-chunked"):  # the last is a left-over of uploads; the content is plain
            return response
        if encoding in ("gzip", "x-gzip") and shown_url.partition("?")[0].endswith((".gz", ".tgz")):
            return response  # some servers say so of such a file, whose bytes these are
        response.close()
        raise UserError(
            f"Cannot download {shown_url}: the server sends it encoded ({encoding}), expected identity, as requested. "
            "Download the file by other means."
        )
    response.close()
    message = f"the server answered {response.status} {one_line(str(response.reason), 100)}"
    if response.status in _TRANSIENT_STATUS:
        raise TransientError(message)
    raise UserError(f"Cannot download {shown_url}: {message}. Check the address and your access.")


def _redirect_target(url: str, location: str, shown_url: str) -> str:
    """Return the target of a redirect; raise unless it is http or https, without a downgrade to http."""
    message = f"Cannot download {shown_url}: it redirects to"
    try:
        target = urljoin(url, location)
    except ValueError as error:
        raise UserError(f"{message} '{one_line(location, 100)}', which is not an address.") from error
    check_address(target, message)
    if url.startswith("https:") and not target.startswith("https:"):
        raise UserError(f"{message} '{one_line(target, 100)}', which is not https.")
    return target


def _connection_error(error: Exception) -> TransientError:
    return TransientError(f"the connection broke ({one_line(str(error) or type(error).__name__, 100)})")
