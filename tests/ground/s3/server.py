"""Run as a program: moto's S3 server, with two properties that buckets have and moto alone has not.

Conditional requests are atomic, and an upload whose connection is lost stores nothing. Its packages are those of
requirements.txt, which PYTHONPATH names.
"""

import io
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def serialized(app: WsgiApp) -> WsgiApp:
    """Answer one request after the other, each when its body is complete."""
    lock = threading.Lock()

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        length = environ.get("CONTENT_LENGTH")
        is_chunked = environ.get("wsgi.input_terminated")
        body = environ["wsgi.input"].read() if is_chunked else environ["wsgi.input"].read(int(length or 0))
        if length and len(body) < int(length):
            start_response("400 Bad Request", [("Content-Length", "0"), ("Connection", "close")])
            return []
        environ["wsgi.input"] = io.BytesIO(body)
        with lock:
            return list(app(environ, start_response))

    return answer


if __name__ == "__main__":
    application = DomainDispatcherApplication(create_backend_app)
    run_simple(sys.argv[1], int(sys.argv[2]), serialized(application), threaded=True)
