"""Every error that chord raises on purpose. Messages say what was expected, what came, and what to do.

The second bases let ordinary code (`except ValueError`, `except LookupError`) work without importing chord.
"""

from __future__ import annotations


class ChordError(Exception):
    """Base of all errors raised on purpose."""


class SettingsError(ChordError, ValueError):
    """A path, a pin or a CHORD_ variable that cannot be honoured."""


class ManifestError(ChordError, ValueError):
    """A manifest that is not one: malformed, of another schema or version, or contradicting itself."""


class TableError(ChordError, ValueError):
    """A table under registry/ that cannot be built; names the file and the line or cell."""


class NoProgramError(ChordError, LookupError):
    """No program serves the problem; names what is allowed and the nearest thing that exists."""


class VerificationError(ChordError):
    """Bytes that are not what the manifest names. They were not given to the driver."""


class MissingCubinError(VerificationError):
    """A cubin that the manifest names is not in the store."""


class PinMismatchError(VerificationError):
    """The manifest's digest is not the pinned one, or two pins contradict each other."""


class RollbackError(PinMismatchError):
    """The manifest is older than the one that a lock file holds."""


class LockError(ChordError, ValueError):
    """A lock file that is not one, or that contradicts the manifest which it names."""


class SignatureError(VerificationError):
    """A key is required, and what it should have signed has no such signature, a wrong one or another key's."""


class ReceiptError(ChordError):
    """A receipt that is not one, or a cubin without one where CHORD_REQUIRE_RECEIPT asks for it."""


class UnsupportedDeviceError(ChordError):
    """A GPU for which no cubin can exist here, or which cannot run this program."""


class DriverError(ChordError, RuntimeError):
    """A CUDA driver call failed. `code` and `name` are the driver's (None where no call was made)."""

    def __init__(self, message: str, code: int | None = None, name: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.name = name


class DriverNotFoundError(DriverError):
    """There is no CUDA driver on this machine, or no cuda-python to reach it with."""


class CaptureError(ChordError):
    """Something that cannot be done inside a CUDA graph capture; says what to preload."""


class ForkError(ChordError):
    """CUDA was initialised before this process was forked, so it cannot be used here."""


class CompileError(ChordError):
    """NVRTC refused a program; carries its log."""


class ToolchainError(ChordError):
    """The pinned compiler is not the one that was found."""


class DamagedCompilerError(ToolchainError):
    """The pinned compiler is installed, but a file of it is missing, cannot be read or holds other bytes."""
