"""The pods' application: answers HTTP with its own name and its client's address.

python -m deploy.demo.app NAME PORT
"""

import http.server
import sys


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers with one line of text, on persistent connections."""

    protocol_version = "HTTP/1.1"
    name = "?"

    def do_GET(self) -> None:
        """Answer with this application's name and its peer."""
        body = (
            f"{self.name} called by {self.client_address[0]}: the secret of this page is plain to see\n".encode()
        )
        self.send_response(200)
        self.send_header("content-type", "text/plain")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        """Answer like a GET."""
        self.do_GET()

    def log_message(self, *args: object) -> None:
        """Do not log, so that only the proxies' lines are shown."""


def main() -> None:
    """Serve requests until the process ends."""
    Handler.name = sys.argv[1]
    http.server.ThreadingHTTPServer.address_family = 10  # AF_INET6: one dual-stack socket
    http.server.ThreadingHTTPServer(("::", int(sys.argv[2])), Handler).serve_forever()


if __name__ == "__main__":
    main()
