from chord.integrations.humming import schema as _schema
from chord.integrations.humming.schema import *  # noqa: F403

__all__ = _schema.__all__
