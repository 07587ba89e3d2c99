"""The pods' application: answers HTTP with its own name and who it was called by.

python -m deploy.demo.app NAME PORT
"""

import http.server
import sys


class Handler(http.server.BaseHTTPRequestHandler):
    """One line of text, on connections that stay open."""

    protocol_version = "HTTP/1.1"
    name = "?"

    def do_GET(self) -> None:
        """Answer with name and peer."""
        body = (
            f"{self.name} called by {self.client_address[0]}: the secret of this page is plain to see\n".encode()
        )
        self.send_response(200)
        self.send_header("content-type", "text/plain")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Say nothing: the proxies' logs are the subject."""


def main() -> None:
    """Serve until ended."""
    Handler.name = sys.argv[1]
    http.server.ThreadingHTTPServer.address_family = 10  # AF_INET6: one dual-stack socket
    http.server.ThreadingHTTPServer(("::", int(sys.argv[2])), Handler).serve_forever()


if __name__ == "__main__":
    main()
