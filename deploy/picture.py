"""Draws the hops of one connection, for the README and docs: ``python -m deploy.picture``.

It draws a light and a dark file, because an image cannot detect the page's theme. Text stays text for screen
readers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

DOCS: Final = Path(__file__).resolve().parents[1] / "docs"
_WIDTH, _HEIGHT = 960, 430
TITLE: Final = "One connection through the mesh"
DESCRIPTION: Final = (
    "A pod speaks plain TCP. Its connection is redirected to the proxy of its node, which picks an endpoint and "
    "opens a stream in an HTTP/2 CONNECT tunnel over mTLS to port 15008 of the other pod. There the node's proxy "
    "authorises the client's SPIFFE identity and forwards plain TCP to the pod. A control plane gives both "
    "proxies workloads, policies and certificates."
)


class Theme(NamedTuple):
    """The colours of one theme."""

    page: str
    text: str
    faint: str
    line: str
    node: str
    pod: str
    proxy: str
    proxy_text: str
    plane: str
    plain: str
    tunnel: str


THEMES: Final = {
    "light": Theme(
        page="#ffffff",
        text="#1f2328",
        faint="#59636e",
        line="#8c959f",
        node="#f6f8fa",
        pod="#ffffff",
        proxy="#0f5bb5",
        proxy_text="#ffffff",
        plane="#f3ecff",
        plain="#9a4d00",
        tunnel="#0b7a3b",
    ),
    "dark": Theme(
        page="#0d1117",
        text="#e6edf3",
        faint="#9aa4b0",
        line="#6e7781",
        node="#161b22",
        pod="#0d1117",
        proxy="#1f6feb",
        proxy_text="#ffffff",
        plane="#251d3a",
        plain="#f0a35e",
        tunnel="#4ac26b",
    ),
}


class _Drawing:
    """Collects shapes, as elements of SVG."""

    def __init__(self, theme: Theme) -> None:
        self.theme = theme
        self.elements: list[str] = []

    def box(self, x: int, y: int, width: int, height: int, fill: str, *, dashed: bool = False) -> None:
        dash = ' stroke-dasharray="4 4"' if dashed else ""
        self.elements.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{fill}" '
            f'stroke="{self.theme.line}"{dash}/>'
        )

    def text(
        self, x: int, y: int, words: str, *, fill: str = "", size: int = 14, bold: bool = False, at: str = "middle"
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.elements.append(
            f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{at}" '
            f'fill="{fill or self.theme.text}"{weight}>{escape(words)}</text>'
        )

    def arrow(
        self, x: int, y: int, to_x: int, to_y: int, colour: str, *, width: int = 2, dashed: bool = False
    ) -> None:
        """Draw a line with an arrow head at its end."""
        dash = ' stroke-dasharray="5 5"' if dashed else ""
        self.elements.append(
            f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="{colour}" stroke-width="{width}"{dash} '
            f'marker-end="url(#{self.head(colour)})"/>'
        )

    @staticmethod
    def head(colour: str) -> str:
        """Return the name of the arrow head in this colour."""
        return f"head-{colour.removeprefix('#')}"

    def number(self, x: int, y: int, number: int, colour: str) -> None:
        """Draw the number of a step, which the legend explains."""
        self.elements.append(f'<circle cx="{x}" cy="{y}" r="11" fill="{colour}"/>')
        self.text(x, y + 5, str(number), fill=self.theme.page, size=13, bold=True)


def picture(theme: Theme) -> str:
    """Return the picture as SVG."""
    draw = _Drawing(theme)
    _node(draw, 20, "node A", "web", client=True)
    _node(draw, 620, "node B", "cart", client=False)
    _control_plane(draw)
    _tunnel(draw)
    _legend(draw)
    heads = "".join(
        f'<marker id="{draw.head(colour)}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="12" '
        'markerHeight="12" markerUnits="userSpaceOnUse" orient="auto">'
        f'<path d="M0 0 10 5 0 10z" fill="{colour}"/></marker>'
        for colour in (theme.line, theme.plain, theme.tunnel)
    )
    lines = "\n".join(draw.elements)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        'aria-labelledby="title description" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">\n'
        f'<title id="title">{escape(TITLE)}</title>\n<desc id="description">{escape(DESCRIPTION)}</desc>\n'
        f"<defs>{heads}</defs>\n"
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="{theme.page}"/>\n{lines}\n</svg>\n'
    )


def _control_plane(draw: _Drawing) -> None:
    theme = draw.theme
    draw.box(365, 14, 230, 52, theme.plane)
    draw.text(480, 37, "control plane", bold=True)
    draw.text(480, 56, "istiod, or ours on a laptop", fill=theme.faint, size=12)
    for x, to_x in ((365, 216), (595, 744)):
        draw.elements.append(
            f'<path d="M{x} 40H{to_x}V192" fill="none" stroke="{theme.line}" stroke-width="1.5" '
            f'stroke-dasharray="5 5" marker-end="url(#{draw.head(theme.line)})"/>'
        )
    draw.text(228, 32, "workloads, policies,", fill=theme.faint, size=12, at="start")
    draw.text(228, 58, "certificates", fill=theme.faint, size=12, at="start")
    draw.text(732, 32, "xDS and CSRs", fill=theme.faint, size=12, at="end")


def _node(draw: _Drawing, x: int, name: str, pod: str, *, client: bool) -> None:
    theme = draw.theme
    draw.box(x, 112, 320, 190, theme.node)
    draw.text(x + 16 if client else x + 304, 136, name, fill=theme.faint, size=13, at="start" if client else "end")
    pod_x, proxy_x = (x + 16, x + 142) if client else (x + 214, x + 16)
    draw.box(pod_x, 196, 90, 76, theme.pod, dashed=True)
    draw.text(pod_x + 45, 230, f"pod {pod}", bold=True)
    draw.text(pod_x + 45, 250, "plain TCP", fill=theme.plain, size=12)
    draw.box(proxy_x, 196, 162, 76, theme.proxy)
    draw.text(proxy_x + 81, 222, "node proxy", fill=theme.proxy_text, bold=True)
    if client:
        draw.text(proxy_x + 81, 243, "15001: route, endpoint", fill=theme.proxy_text, size=12)
        draw.text(proxy_x + 81, 260, "identity of web", fill=theme.proxy_text, size=12)
        draw.arrow(pod_x + 90, 234, proxy_x, 234, theme.plain)
        draw.number(pod_x + 113, 214, 1, theme.plain)
        draw.number(proxy_x + 148, 186, 2, theme.text)
    else:
        draw.text(proxy_x + 81, 243, "15008: proof, policy", fill=theme.proxy_text, size=12)
        draw.text(proxy_x + 81, 260, "identity of cart", fill=theme.proxy_text, size=12)
        draw.arrow(proxy_x + 162, 234, pod_x, 234, theme.plain)
        draw.number(proxy_x + 14, 186, 4, theme.text)
        draw.number(proxy_x + 180, 214, 5, theme.plain)


def _tunnel(draw: _Drawing) -> None:
    theme = draw.theme
    draw.arrow(324, 234, 634, 234, theme.tunnel, width=4)
    draw.number(480, 234, 3, theme.tunnel)
    draw.text(480, 172, "HBONE: HTTP/2 CONNECT", fill=theme.tunnel, bold=True)
    draw.text(480, 192, "over mTLS 1.3", fill=theme.tunnel, size=13)
    draw.text(480, 276, "one connection for many", fill=theme.faint, size=12)
    draw.text(480, 293, "streams of a pair of pods", fill=theme.faint, size=12)


def _legend(draw: _Drawing) -> None:
    theme = draw.theme
    steps = (
        "1  redirected in the pod, or by TPROXY",
        "2  matched by source, destination and port",
        "3  the original destination is in the request",
        "4  the client's SPIFFE identity is authorised",
        "5  forwarded as plain TCP, from the client's address",
    )
    for index, words in enumerate(steps):
        draw.text(28 + index % 2 * 470, 338 + index // 2 * 28, words, fill=theme.text, size=14, at="start")
    draw.text(498, 394, "an answer takes the same way back", fill=theme.faint, size=13, at="start")


def files() -> dict[Path, str]:
    """Return the content of each picture file, by the file's path."""
    return {DOCS / f"hops-{name}.svg": picture(theme) for name, theme in THEMES.items()}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
