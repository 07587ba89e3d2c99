"""Configuration text is read as Envoy reads it: accepted alike, and with the same meaning."""

import pytest

from tests.interop import text_forms as forms
from tests.interop.proxies import ENVOY

pytestmark = pytest.mark.interop


@pytest.fixture(scope="module")
def accepted() -> dict[str, bool]:
    """Whether Envoy accepts each form. Clusters that we accept are tried together first, in one process."""
    if not ENVOY.exists():
        pytest.skip("NOT TESTED: no Envoy here")
    ours = [
        form
        for form in forms.CLUSTERS
        if forms.read_here(forms.text_of(form)) is not None and not form.startswith(tuple(forms.DIFFERENT))
    ]
    together = set(ours) if forms.accepted_together(ours) else set()
    texts = {form: forms.text_of(form) for form in forms.CLUSTERS if form not in together}
    texts |= {form: forms.bootstrap_of(form) for form in forms.BOOTSTRAPS}
    return dict.fromkeys(together, True) | dict(zip(texts, forms.accepted_by_envoy(texts.values()), strict=True))


def test_forms_are_accepted_and_refused_like_envoys(accepted: dict[str, bool]) -> None:
    ours = {form: forms.read_here(forms.text_of(form)) is not None for form in forms.CLUSTERS}
    ours |= {form: forms.read_here(forms.bootstrap_of(form)) is not None for form in forms.BOOTSTRAPS}
    different = {
        form: f"envoy {accepted[form]}, ours {ours[form]}" for form in ours if ours[form] != accepted[form]
    }
    reasons = {form: why for form in different for start, why in forms.DIFFERENT.items() if form.startswith(start)}
    assert {form: words for form, words in different.items() if form not in reasons} == {}
    assert len(reasons) == len(forms.DIFFERENT), "a difference is gone"
    assert sum(accepted.values()) > 60


def test_accepted_forms_mean_what_they_mean_to_envoy(accepted: dict[str, bool]) -> None:
    common = [form for form in forms.CLUSTERS if accepted[form] and not form.startswith(tuple(forms.DIFFERENT))]
    shown = forms.as_message(forms.understood_by_envoy(common)).static_resources.clusters
    different = {}
    for number, form in enumerate(common):
        read = forms.read_here(forms.text_of(form, f"app{number}"))
        assert read is not None
        (ours,) = read.static_resources.clusters
        if ours != shown[number]:
            different[form] = f"envoy {shown[number]}, ours {ours}"
    assert different == {}
