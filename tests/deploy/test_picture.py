"""The picture of the hops: files that are up to date, described in words, and legible in both themes."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from deploy import picture

SVG = "{http://www.w3.org/2000/svg}"


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.2)."""

    def linear(part: str) -> float:
        value = int(part, 16) / 255
        return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4

    red, green, blue = (linear(colour[at : at + 2]) for at in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def test_the_committed_pictures_are_the_generated_ones() -> None:
    for path, text in picture.files().items():
        assert path.read_text() == text, "python -m deploy.picture"
        assert len(text) < 10_000


@pytest.mark.parametrize("path", picture.files(), ids=lambda path: path.name)
def test_the_picture_has_a_text_for_screen_readers(path: Path) -> None:
    root = ElementTree.fromstring(path.read_text())
    assert root.get("role") == "img"
    labels = {f"{root.findtext(f'{SVG}title')}", f"{root.findtext(f'{SVG}desc')}"}
    assert labels == {picture.TITLE, picture.DESCRIPTION}
    assert {each.get("id") for each in (*root.iter(f"{SVG}title"), *root.iter(f"{SVG}desc"))} == {
        *(root.get("aria-labelledby") or "").split()
    }


@pytest.mark.parametrize("name", picture.THEMES)
def test_text_has_enough_contrast(name: str) -> None:
    theme = picture.THEMES[name]
    for text in (theme.text, theme.faint, theme.plain, theme.tunnel):
        assert contrast(text, theme.page) >= 4.5, text
    for text in (theme.text, theme.faint):
        for behind in (theme.node, theme.plane):
            assert contrast(text, behind) >= 4.5, (text, behind)
    assert contrast(theme.proxy_text, theme.proxy) >= 4.5


def test_the_readme_shows_the_light_and_the_dark_picture() -> None:
    text = (picture.DOCS.parent / "README.md").read_text()
    for path in picture.files():
        assert f"docs/{path.name}" in text
