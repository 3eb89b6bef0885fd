"""Fetch one file over HTTP: resumed where it broke off, checked before it gets its name."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from pathlib import Path

import httpx

from routewise.errors import RoutewiseError
from routewise.progress import Progress

#: Answers after which the same request may well succeed.
PASSING_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


def download(
    url: str,
    target: Path,
    sha256: str,
    *,
    attempts: int = 5,
    wait_s: float = 1.0,
    timeout_s: float = 60.0,
) -> None:
    """Fetch ``url`` to ``target``, which is whole and of this SHA-256, or absent.

    What has come is kept beside the target in ``.NAME.part`` with the server's validator (a strong
    ETag, or Last-Modified) in ``.NAME.part.json``. A later call asks for the rest under that
    validator; a server that cannot (no ranges, another ETag) sends the whole again. A broken
    connection is taken up again, up to ``attempts`` times in a row without a new byte, after
    ``wait_s`` seconds, doubled each time. ``timeout_s`` is the longest silence of the server.

    Raises RoutewiseError where the server refuses or falls silent (what came is kept), and where
    the digest is another (nothing is kept).
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.parent / f".{target.name}.part"
    progress = Progress(f"downloading {target.name}", None)
    failures = 0
    furthest = _size(part)
    with httpx.Client(follow_redirects=True, timeout=timeout_s) as client:
        while True:
            try:
                _fetch_rest(client, url, part, progress)
                break
            except (httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.TooManyRedirects) as error:
                raise RoutewiseError(
                    f"{url}: cannot be fetched ({error})", "check the url in the study"
                ) from error
            except (httpx.TransportError, httpx.StreamError, _Passing) as error:
                failures = 1 if _size(part) > furthest else failures + 1
                furthest = max(furthest, _size(part))
                if failures >= attempts:
                    raise RoutewiseError(
                        f"{url}: {_reason(error, timeout_s)}; {_size(part):,} bytes have come",
                        "check the network and run the same command again: it goes on from there",
                    ) from error
                time.sleep(wait_s * 2 ** (failures - 1))
    progress.finish()
    found = _digest(part)
    if found != sha256:
        n_bytes = _size(part)
        _forget(part)
        raise RoutewiseError(
            f"{url}: SHA-256 is {found} ({n_bytes:,} bytes), wanted {sha256}; nothing was kept",
            "check the sha256 in the study against the publisher's; if it is right, try again",
        )
    os.replace(part, target)
    _forget(part)


class _Passing(Exception):
    """An answer that may be another the next time; the argument is the status line."""


def _fetch_rest(client: httpx.Client, url: str, part: Path, progress: Progress) -> None:
    """Bring ``part`` to its full length, or raise what stopped it."""
    headers = {"Accept-Encoding": "identity"}  # a recompressed body could not be resumed
    n_there = _size(part)
    validator = _read_validator(part, url)
    if n_there and validator:
        headers |= {"Range": f"bytes={n_there}-", "If-Range": validator}
    with client.stream("GET", url, headers=headers) as response:
        status = response.status_code
        if status == 416 and "Range" in headers:
            if response.headers.get("Content-Range") == f"bytes */{n_there}":
                return  # all of it was there, and only the renaming was missing
            _forget(part)
            raise _Passing("the server has fewer bytes than were kept; starting again")
        if status in PASSING_STATUS:
            raise _Passing(f"the server answers {status} {response.reason_phrase}")
        if status not in (200, 206):
            raise RoutewiseError(
                f"{url}: the server answers {status} {response.reason_phrase}",
                "check the url in the study"
                + (", and whether it wants a login" if status in (401, 403) else ""),
            )
        resumes = status == 206
        if resumes and _range_start(response) != n_there:
            _forget(part)
            raise _Passing(f"the server sent {response.headers.get('Content-Range')!r}")
        if not resumes:
            _forget(part)
        _write_validator(part, url, response)
        length = response.headers.get("Content-Length")
        first = n_there if resumes else 0
        progress.total = first + int(length) if length and length.isdigit() else None
        progress.start_at(first)
        try:
            with part.open("ab" if resumes else "wb") as stream:
                for chunk in response.iter_raw():
                    stream.write(chunk)
                    progress.advance(len(chunk))
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            if error.filename is None:  # a failed write does not say to what
                error.filename = str(part)
            raise


def _range_start(response: httpx.Response) -> int | None:
    match = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return int(match[1]) if match else None


def _validator_path(part: Path) -> Path:
    return part.with_name(f"{part.name}.json")


def _read_validator(part: Path, url: str) -> str | None:
    try:
        document = json.loads(_validator_path(part).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return document.get("validator") if document.get("url") == url else None


def _write_validator(part: Path, url: str, response: httpx.Response) -> None:
    etag = response.headers.get("ETag")
    strong = etag if etag and not etag.startswith("W/") else None
    validator = strong or response.headers.get("Last-Modified")
    _validator_path(part).write_text(json.dumps({"url": url, "validator": validator}))


def _forget(part: Path) -> None:
    part.unlink(missing_ok=True)
    _validator_path(part).unlink(missing_ok=True)


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _reason(error: Exception, timeout_s: float) -> str:
    if isinstance(error, httpx.TimeoutException):
        return f"the server was silent for {timeout_s:g} s"
    if isinstance(error, httpx.ConnectError):
        return f"no connection ({error})"
    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):
        return f"the connection broke off ({error or type(error).__name__})"
    return str(error) or type(error).__name__
