"""The vLLM plugin without vLLM: inert, lazy, and clear about releases and limits."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module, util
from types import SimpleNamespace

import pytest
import torch

from chord import _paths
from chord.integrations import hosts
from chord.integrations.vllm.limits import check_layer

ROOT = _paths.PACKAGE.parent


@pytest.mark.parametrize("host", ["vllm", "sglang"])
def test_registering_without_the_host_does_nothing(host: str) -> None:
    if util.find_spec(host) is not None:
        pytest.skip(f"{host} is installed here")
    code = (
        f"import sys; from chord.integrations.{host} import register; register(); register(); "
        "print(sorted({'torch', 'vllm', 'sglang', 'humming', 'chord.registry'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
    assert ran.stderr == ""


@pytest.mark.parametrize(("group", "host"), [("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")])
def test_the_entry_points_are_declared(group: str, host: str) -> None:
    """In the project file: what is installed may be another tree's."""
    text = (ROOT / "pyproject.toml").read_text()
    (value,) = re.findall(rf'^\[project\.entry-points\."{re.escape(group)}"\]\nchord = "(.+)"$', text, re.MULTILINE)
    module, _, name = value.partition(":")
    assert module == f"chord.integrations.{host}"
    assert callable(getattr(import_module(module), name))


@pytest.mark.parametrize(
    ("version", "served"),
    [("0.5.23", True), ("0.5.99.dev1", True), ("0.5.22", False), ("0.5", False), ("0.4.30", False), ("0.6.0", False)],
)
def test_releases_of_sglang(version: str, served: bool) -> None:
    said = hosts.refusal(hosts.SGLANG, version)
    assert (said is None) == served
    assert said is None or "SGLANG_PLUGINS" in said


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1.post1", "0.33.0", "0.33.1rc1.dev5+gabc"])
def test_releases_that_are_served(version: str) -> None:
    assert hosts.refusal(hosts.VLLM, version) is None


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0.0", "nightly"])
def test_other_releases_are_told_what_to_do(version: str) -> None:
    said = hosts.refusal(hosts.VLLM, version)
    assert said is not None
    assert f"serves vllm 0.32 <= version < 0.34, found {version}" in said
    assert "VLLM_PLUGINS" in said


@pytest.mark.parametrize("host", [hosts.VLLM, hosts.SGLANG], ids=lambda host: host.distribution)
def test_the_extras_declare_the_same_releases(host: hosts.Host) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    (found,) = re.findall(rf'^{host.distribution} = \["{host.distribution}>=(\S+),<(\S+)"\]', text, re.MULTILINE)
    assert found == (".".join(map(str, host.first)), ".".join(map(str, host.end)))


def test_an_absent_host() -> None:
    assert hosts.installed(hosts.Host("chord-no-such-host", (0, 1), (0, 2), "")) is None


@pytest.mark.parametrize("host", [hosts.VLLM, hosts.SGLANG], ids=lambda host: host.distribution)
def test_a_host_without_metadata(host: hosts.Host) -> None:
    """One that can be imported, from a folder on the path for example: it is not said to be missing."""
    said = str(hosts.refusal(host, None))
    assert f"serves {host.distribution}" in said
    assert "version is unknown" in said
    assert "not installed" not in said


def layer_config(**changes: object) -> SimpleNamespace:
    values = {
        "activation": "silu",
        "has_bias": False,
        "in_dtype": torch.bfloat16,
        "is_lora_enabled": False,
        "moe_parallel_config": SimpleNamespace(enable_eplb=bool(changes.pop("eplb", False))),
        "swiglu_alpha": None,
        "swiglu_beta": None,
        "swiglu_limit": None,
    }
    return SimpleNamespace(**(values | changes))


def test_a_layer_within_the_limits() -> None:
    check_layer(layer_config(), "layers.1", silu="silu")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"is_lora_enabled": True}, r"LoRA on routed experts \(layers\.1\); leave --enable-lora out"),
        ({"eplb": True}, "expert load balancing .*leave --enable-eplb out"),
        ({"has_bias": True}, "biases of experts"),
        ({"in_dtype": torch.float16}, "torch.float16 .*use --dtype bfloat16"),
        ({"activation": "gelu"}, "the activation gelu"),
        ({"swiglu_limit": 7.0, "swiglu_alpha": 1.7}, "clamped SwiGLU, swiglu_limit = 7.0, swiglu_alpha = 1.7"),
    ],
)
def test_limits_are_named(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=f"--quantization chord does not serve .*{said}"):
        check_layer(layer_config(**changes), "layers.1", silu="silu")
