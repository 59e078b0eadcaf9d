"""What the compiler may say without failing a build."""

import pytest

from chord.build.make import _refuse_serialised
from chord.errors import CompileError

NOTE = "ptxas info    : (C7519) warpgroup.arrive is injected in around line 12 by compiler to allow use of registers\n"
LOSS = (
    "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
    "insufficient register resources for the function 'k'\n"
)


def test_serialised_wgmma_fails_the_build() -> None:
    _refuse_serialised("")
    _refuse_serialised(NOTE)
    with pytest.raises(CompileError, match="serialises wgmma"):
        _refuse_serialised(NOTE + LOSS)
