from chord.integrations.humming import dtypes as _dtypes
from chord.integrations.humming.dtypes import *  # noqa: F403

__all__ = _dtypes.__all__
