"""Pure Python, unless ``ZTUNNEL_COMPILE=1`` has mypyc compile the tunnel engine from the same source.

``ZTUNNEL_COMPILE=1 pip wheel --no-build-isolation .`` makes a wheel, ``make compiled`` builds in place. What is
compiled are the modules that run per chunk and per tunnel. Of those, none may wait inside ``try``
(``hbone/aio/waits.py`` says why), and classes that others subclass by name stay as they are.
"""

import os

from setuptools import setup

COMPILED = (
    "hbone/end_state.py",
    "hbone/engine.py",
    "hbone/events.py",
    "hbone/flow.py",
    "hbone/frames.py",
    "hbone/head.py",
    "hbone/headers.py",
    "hbone/hpack_cache.py",
    "hbone/hpack_pieces.py",
    "hbone/output.py",
    "hbone/reader.py",
    "hbone/stream_state.py",
    "hbone/tls.py",
    "hbone/windows.py",
    "hbone/work_account.py",
    "hbone/aio/answers.py",
    "hbone/aio/connection.py",
    "hbone/aio/end.py",
    "hbone/aio/keepalive.py",
    "hbone/aio/link.py",
    "hbone/aio/observed.py",
    "hbone/aio/poller.py",
    "hbone/aio/relay.py",
    "hbone/aio/interval_timer.py",
    "hbone/aio/socket.py",
    "hbone/aio/spin.py",
    "hbone/aio/splice.py",
    "hbone/aio/tls_socket.py",
    "hbone/aio/tunnel.py",
)

if __name__ == "__main__":
    extensions = []
    if os.environ.get("ZTUNNEL_COMPILE") == "1":
        from mypyc.build import mypycify

        # The name puts what they share into the package: beside it, an editable install does not find it.
        extensions = mypycify(
            ["--config-file", "pyproject.toml", *COMPILED], opt_level="3", group_name="hbone.compiled"
        )
    setup(ext_modules=extensions)
