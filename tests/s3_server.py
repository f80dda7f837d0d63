"""A real S3 server (moto's server process) and a proxy before it that fails the way networks and buckets do."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

FAULTS = ("503", "403", "drop", "truncate", "short", "flip", "corrupt", "stall")
SLOW_DOWN = b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>SlowDown</Code><Message>Please slow down</Message></Error>'
DENIED = b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>'


def environment(endpoint: str) -> dict[str, str]:
    """Return the standard variables by which any S3 client finds the server."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@dataclass(frozen=True)
class S3Server:
    """A running server."""

    port: int

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Create or replace an object (and its bucket)."""
        self._client(bucket).put_object(Bucket=bucket, Key=key, Body=data)

    def put_folder(self, bucket: str, prefix: str, folder: Path) -> None:
        """Upload every file below `folder`."""
        client = self._client(bucket)
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                key = "/".join(part for part in (prefix, path.relative_to(folder).as_posix()) if part)
                client.put_object(Bucket=bucket, Key=key, Body=path.read_bytes())

    def _client(self, bucket: str) -> Any:
        import boto3

        names = environment(self.endpoint)
        client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=names["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=names["AWS_SECRET_ACCESS_KEY"],
            region_name=names["AWS_DEFAULT_REGION"],
        )
        client.create_bucket(Bucket=bucket)
        return client


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    """Run moto's server as a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    variables = os.environ | environment(f"http://127.0.0.1:{port}")
    process = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, "moto's server did not start"
                time.sleep(0.05)
        yield S3Server(port)
    finally:
        process.kill()
        process.wait()


@dataclass
class FaultyProxy:
    """An HTTP proxy before the server. Requests whose path holds the fault's text fail in the order they were injected.

    503, 403: an error answer. drop: the connection is reset before an answer. truncate: half of the body, then a reset.
    short: a well-formed answer with half of the bytes. flip: the last byte is another one. corrupt: that too, without the
    server's checksum. stall: half of the body, then nothing until `release` is called.
    """

    port: int
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """(method, path, Range header) of every request that arrived."""
    stalled: threading.Event = field(default_factory=threading.Event)
    """Set while an answer is stuck."""
    _faults: list[tuple[str, str, str]] = field(default_factory=list)
    _released: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def inject(self, *faults: str, path: str = "", method: str = "GET") -> None:
        """Let the next requests of `method` whose path holds `path` fail, one per fault."""
        assert set(faults) <= set(FAULTS), faults
        with self._lock:
            self._faults += [(fault, method, path) for fault in faults]
        self._released.clear()
        self.stalled.clear()

    def release(self) -> None:
        """End the stalled answers."""
        self._released.set()

    def reset(self) -> None:
        """Forget pending faults and recorded requests."""
        with self._lock:
            self._faults.clear()
            self.requests.clear()
        self.release()

    @property
    def pending(self) -> int:
        """Faults that have not happened yet."""
        return len(self._faults)

    def _next_fault(self, method: str, path: str, span: str) -> str | None:
        with self._lock:
            self.requests.append((method, path, span))
            for position, (fault, wanted, text) in enumerate(self._faults):
                if wanted == method and text in path:
                    del self._faults[position]
                    return fault
        return None


@contextlib.contextmanager
def faulty_proxy(upstream: S3Server) -> Iterator[FaultyProxy]:
    """Run a proxy before `upstream` in threads of this process."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None: ...

        def forward(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            sent = self.rfile.read(size) if size else None
            fault = proxy._next_fault(self.command, self.path, self.headers.get("Range", ""))
            if fault == "drop":
                return self.break_connection()
            if fault in ("503", "403"):
                body = SLOW_DOWN if fault == "503" else DENIED
                return self.answer(int(fault), [("Content-Type", "application/xml")], body, len(body))
            status, headers, body = self.ask(sent)
            length = len(body)
            if fault in ("flip", "corrupt"):
                body = body[:-1] + bytes([body[-1] ^ 1])
            if fault in ("corrupt", "short"):
                headers = [pair for pair in headers if not pair[0].lower().startswith("x-amz-checksum")]
            if fault == "short":
                body, length = body[: length // 2], length // 2
            if fault not in ("truncate", "stall"):
                return self.answer(status, headers, body, length)
            self.answer(status, headers, body[: length // 2], length)
            self.wfile.flush()
            if fault == "stall":
                proxy.stalled.set()
                proxy._released.wait()
            self.break_connection()

        def ask(self, body: bytes | None) -> tuple[int, list[tuple[str, str]], bytes]:
            connection = http.client.HTTPConnection("127.0.0.1", upstream.port, timeout=60)
            connection.request(self.command, self.path, body, dict(self.headers))
            response = connection.getresponse()
            headers = [pair for pair in response.getheaders() if pair[0].lower() not in HOP_BY_HOP]
            content = response.read()
            if self.command == "HEAD":
                headers.append(("Content-Length", response.headers.get("Content-Length", "0")))
            connection.close()
            return response.status, headers, content

        def answer(self, status: int, headers: list[tuple[str, str]], body: bytes, length: int) -> None:
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(length))
            elif not any(name == "Content-Length" for name, _ in headers):
                self.send_header("Content-Length", "0")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def break_connection(self) -> None:
            # Closing with unsent data and no linger sends a reset, as a crashed peer does.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None: ...  # clients that went away are the point

    server = Server(("127.0.0.1", 0), Handler)
    proxy = FaultyProxy(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.release()
        server.shutdown()
        server.server_close()


HOP_BY_HOP = ("content-length", "transfer-encoding", "connection", "date", "server")
