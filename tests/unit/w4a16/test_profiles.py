"""Names of deployments: from shapes, architectures, roles and the two variables; contradictions are refused."""

import warnings

import pytest

from chord import _settings
from chord._settings import Settings
from chord.errors import SettingsError
from chord.w4a16.layout import WeightShape
from chord.w4a16.profiles import PROFILES, select_profile

EP, TP, OTHER = WeightShape(48, 4096, 7168), WeightShape(384, 512, 7168), WeightShape(8, 256, 128)
NOTHING = Settings()


@pytest.mark.parametrize(
    ("shape", "arch", "options", "settings", "name"),
    [
        (EP, "sm_90a", {}, NOTHING, "h200_prefill_ep8"),
        (EP, "sm_90a", {"role": "decode"}, NOTHING, "h200_decode_ep8"),
        (EP, "sm_90a", {}, Settings(sm90_decode=True), "h200_decode_ep8"),
        (EP, "sm_90a", {"role": "prefill"}, Settings(sm90_decode=True), "h200_prefill_ep8"),
        (EP, "sm_90a", {}, Settings(use_grouped=True), "h200_grouped_prefill"),
        (EP, "sm_90a", {}, Settings(use_grouped=True, sm90_decode=True), "h200_grouped_decode"),
        (EP, "sm_103a", {}, Settings(use_grouped=True), "blackwell_decode_ep8"),
        (EP, "sm_100a", {"role": "decode"}, NOTHING, "blackwell_decode_ep8"),
        (EP, None, {}, NOTHING, "h200_prefill_ep8"),
        (TP, "sm_90a", {}, Settings(sm90_decode=True), "h200_tp8"),
        (TP, None, {"tensor_parallel_size": 8}, NOTHING, "h200_tp8"),
        (OTHER, "sm_90a", {}, NOTHING, "h200_prefill_ep8"),
        (OTHER, "sm_90a", {"tensor_parallel_size": 8}, NOTHING, "h200_tp8"),
        (OTHER, "sm_100a", {"profile": "blackwell_decode_ep8"}, NOTHING, "blackwell_decode_ep8"),
        (OTHER, "sm_90a", {"profile": "h200_grouped_decode", "role": "decode"}, NOTHING, "h200_grouped_decode"),
        (OTHER, "sm_90a", {"profile": "h200_tp8", "role": "decode", "tensor_parallel_size": 2}, NOTHING, "h200_tp8"),
    ],
)
def test_profiles_are_inferred(shape, arch, options, settings, name):
    found = select_profile(shape, arch, settings=settings, **options)
    assert found == PROFILES[name]
    assert arch is None or arch in found.archs


@pytest.mark.parametrize(
    ("shape", "arch", "options", "settings", "message"),
    [
        (EP, "sm_90a", {"tensor_parallel_size": 8}, NOTHING, "8 contradicts the projection 4096 x 7168"),
        (TP, "sm_90a", {"tensor_parallel_size": 1}, NOTHING, "1 contradicts the projection 512 x 7168.*TP8"),
        (OTHER, "sm_90a", {"tensor_parallel_size": 4}, NOTHING, "tensor_parallel_size: expected 1 or 8, got 4"),
        (TP, "sm_100a", {}, NOTHING, "h200_tp8 is for sm_90a, the weights are on sm_100a"),
        (EP, "sm_90a", {"profile": "h100"}, NOTHING, "profile: expected auto or one of h200_prefill_ep8, .*'h100'"),
        (EP, "sm_90a", {"profile": "blackwell_decode_ep8"}, NOTHING, "is for sm_100a and sm_103a"),
        (EP, "sm_90a", {"role": "mix"}, NOTHING, "role: 'mix'"),
        (
            EP,
            "sm_90a",
            {"profile": "h200_decode_ep8", "role": "prefill"},
            NOTHING,
            "role: 'prefill' contradicts the profile h200_decode_ep8, which is for decode; leave one out",
        ),
        (
            OTHER,
            "sm_90a",
            {"profile": "h200_prefill_ep8", "tensor_parallel_size": 8},
            NOTHING,
            "tensor_parallel_size: 8 contradicts the profile h200_prefill_ep8, which is for experts that are not split",
        ),
        (EP, "sm_90a", {"role": "train"}, NOTHING, "role: expected one of prefill, decode, mix, got 'train'"),
        (TP, "sm_90a", {"role": "train"}, NOTHING, "role: expected one of prefill, decode, mix, got 'train'"),
        (TP, "sm_90a", {}, Settings(use_grouped=True), "CHORD_USE_GROUPED=1: expected experts that are not split"),
    ],
)
def test_contradictions_are_named(shape, arch, options, settings, message):
    with pytest.raises(ValueError, match=message):
        select_profile(shape, arch, settings=settings, **options)


@pytest.mark.parametrize("size", [True, 8.0, "8"])
def test_a_size_that_is_no_number_of_gpus_is_refused(size):
    with pytest.raises(TypeError, match="tensor_parallel_size: expected an int, got"):
        select_profile(OTHER, "sm_90a", tensor_parallel_size=size, settings=NOTHING)


def test_switches_are_read_and_their_lack_of_effect_said_once(monkeypatch):
    monkeypatch.setattr(_settings, "_warned", set())
    environ = {"CHORD_SM90_DECODE": "1", "CHORD_USE_GROUPED": "0"}
    with pytest.warns(UserWarning, match="selects no kernel: one packed layout serves") as caught:
        read = _settings.read(environ)
    assert (read.sm90_decode, read.use_grouped) == (True, False)
    assert len(caught) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _settings.read(environ) == read
    assert (_settings.read({}).sm90_decode, _settings.read({}).use_grouped) == (None, None)


@pytest.mark.parametrize("name", _settings.WITHOUT_EFFECT)
@pytest.mark.parametrize("value", ["", "yes", "2"])
def test_other_values_of_the_switches_are_refused(name, value):
    with pytest.raises(SettingsError, match=f"{name} is '{value}': expected 0 or 1"):
        _settings.read({name: value})
