"""A stand-in for the package `humming`, for vLLM's own humming code path: --moe-backend humming, without a plugin.

Its surface lies in the folder `root`, which is no package: it is put on the import path only when a user asks for it,
by CHORD_HUMMING=1 or by PYTHONPATH=$(chord humming-path). It serves INT4 experts in groups of 32; whatever else vLLM
would send to humming is refused by name when it is loaded.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from chord.errors import ChordError
from chord.integrations import hosts

ROOT = Path(__file__).resolve().parent / "root"
"""What goes on the import path."""

_log = logging.getLogger(f"vllm.{__name__}")  # below vllm's logger, so that the lines appear where its own do


def activate() -> bool:
    """Puts the stand-in first on the import path; whether it is the one that is imported from now on.

    Another `humming` that is imported already stays as it is.
    """
    present = sys.modules.get("humming")
    if present is not None and not is_ours(present):
        _log.warning(
            "CHORD_HUMMING=1 has no effect: humming was imported from %s before; use PYTHONPATH=$(chord humming-path)",
            getattr(present, "__file__", "elsewhere"),
        )
        return False
    if present is None and sys.path[:1] != [str(ROOT)]:  # anywhere else, another humming may be found before it
        sys.path[:] = [str(ROOT), *(path for path in sys.path if path != str(ROOT))]
        _log.info("chord stands in for humming, from %s", ROOT)
    return True


def is_ours(module: object) -> bool:
    """Whether a module named humming is the stand-in."""
    file = getattr(module, "__file__", None)
    return file is not None and ROOT in Path(file).resolve().parents


def check_import() -> None:
    """Raises ImportError where the stand-in could serve nothing, so that vLLM goes on without humming.

    That is: another release of vLLM, a GPU without cubins, or no registry. Starts no CUDA context.
    """
    if (version := hosts.installed(hosts.VLLM)) is not None:
        why_not = hosts.refusal(hosts.VLLM, version)
        if why_not is not None:
            raise ImportError(why_not, name="humming")
    try:
        _check_device()
    except ChordError as error:
        raise ImportError(f"chord cannot stand in for humming: {error}", name="humming") from error


def _check_device() -> None:
    from chord import _runtime
    from chord.registry.architectures import of_capability

    found = _capability()
    if found is not None:
        arch = of_capability(*found)
        if arch not in _runtime.operator("moe_w4a16").routes:
            raise ChordError(f"this registry has no kernels for {arch}")


def _capability() -> tuple[int, int] | None:
    """As vLLM's platform tells it, which asks NVML; None where that is not known without starting CUDA."""
    platforms = sys.modules.get("vllm.platforms")
    if platforms is not None:
        platform = platforms.current_platform
        capability = platform.get_device_capability() if platform.is_cuda() else None
        return None if capability is None else (capability[0], capability[1])
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        major, minor = torch.cuda.get_device_capability()
        return major, minor
    return None
