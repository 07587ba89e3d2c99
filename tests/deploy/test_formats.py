"""The reference of formats is that of the readers, and shows every key that they accept."""

import pytest
import yaml

from deploy import formats
from deploy.formats import FORMATS, Format


def test_the_reference_is_up_to_date() -> None:
    assert formats.REFERENCE.read_text() == formats.text(), "python -m deploy.formats"


@pytest.mark.parametrize("each", FORMATS, ids=lambda each: each.title)
def test_every_key_that_is_read_is_shown(each: Format) -> None:
    assert len(each.keys()) >= 3
    assert each.keys() - each.shown() == set()


@pytest.mark.parametrize("each", FORMATS, ids=lambda each: each.title)
def test_the_example_is_yaml(each: Format) -> None:
    assert isinstance(yaml.safe_load(each.example), dict)
