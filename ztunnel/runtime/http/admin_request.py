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
    if _is_local(request.host):
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        response: http.client.HTTPResponse = opener.open(request, timeout=limit_s)
    else:
        response = urllib.request.urlopen(request, timeout=limit_s)
    return response


def _is_local(host: str) -> bool:
    """Return whether ``HOST``, ``HOST:PORT`` or ``[HOST]:PORT`` is this machine's loopback."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name.lower() == "localhost"
