"""chord in SGLang: `sglang serve --model-path <checkpoint> --quantization chord`. docs/vllm.md tells what is served.

SGLang calls `register` in each of its processes, through the entry point group sglang.srt.plugins.
"""

from __future__ import annotations

import logging
from importlib import util

from chord.integrations import hosts

NAME = "chord"
"""The quantization method, as --quantization takes it."""

_log = logging.getLogger(__name__)


def register() -> None:
    """Makes the quantization method known to SGLang.

    May be called any number of times. Does nothing where SGLang is not installed; where its release is not served, says
    so in the log and leaves SGLang as it was.
    """
    if util.find_spec("sglang") is None:
        return
    why_not = hosts.refusal(hosts.SGLANG, hosts.installed(hosts.SGLANG))
    if why_not is not None:
        _log.warning("%s", why_not)
        return
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS
    from sglang.srt.server_args import QUANTIZATION_CHOICES, add_quantization_method_choices

    from chord.integrations.sglang.config import ChordConfig

    if NAME not in QUANTIZATION_CHOICES:
        add_quantization_method_choices([NAME])
    QUANTIZATION_METHODS.setdefault(NAME, ChordConfig)
