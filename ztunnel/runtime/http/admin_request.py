"""Opens a page of an admin server for a command.

Only commands import this: a proxy does not load ``urllib.request`` (:mod:`ztunnel.runtime.unused_imports`).
"""

import http.client
import ipaddress
import urllib.request


def open_page(url: str, *, method: str = "GET", limit_s: float) -> http.client.HTTPResponse:
    """Return the response for a URL.

    The proxies that environment variables name (``http_proxy``) are not used for ``localhost`` and loopback
    addresses, like in Go (``http.ProxyFromEnvironment``) and so in kubectl. Otherwise the HTTP proxy would be
    asked for its own loopback address.

    Args:
        limit_s: the time limit for each step of the answer.

    Raises:
        urllib.error.HTTPError: the server refuses.
        OSError, ValueError, http.client.HTTPException: there is no answer, or the URL is malformed.
    """
    request = urllib.request.Request(url, method=method)
    # Not urlopen, whose opener keeps the environment of its first call.
    proxies = urllib.request.ProxyHandler({} if _is_local(request.host) else None)
    response: http.client.HTTPResponse = urllib.request.build_opener(proxies).open(request, timeout=limit_s)
    return response


def _is_local(host: str) -> bool:
    """Return whether ``HOST``, ``HOST:PORT`` or ``[HOST]:PORT`` is this machine's loopback."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name.lower() == "localhost"
