"""chord in vLLM: `vllm serve <checkpoint> --quantization chord`. docs/vllm.md tells how, and what is served.

vLLM calls `register` in each of its processes, through the entry point group vllm.general_plugins.
"""

from __future__ import annotations

import logging
from importlib import util

from chord import _settings
from chord.integrations import hosts

NAME = "chord"
"""The quantization method, as --quantization takes it."""

_log = logging.getLogger(f"vllm.{__name__}")  # below vllm's logger, so that the lines appear where its own do


def register() -> None:
    """Makes the quantization method known to vLLM; with CHORD_HUMMING=1 puts the stand-in for humming on the path.

    May be called any number of times. Does nothing where vLLM is not installed; where its release is not served, says
    so in the log and leaves vLLM as it was.
    """
    if util.find_spec("vllm") is None:
        return
    why_not = hosts.refusal(hosts.VLLM, hosts.installed(hosts.VLLM))
    if why_not is not None:
        _log.warning("%s", why_not)
        return
    if _settings.read().humming:
        from chord.integrations import humming

        humming.activate()
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    if NAME not in QUANTIZATION_METHODS:
        from chord.integrations.vllm import entry

        entry.register()
