"""chord in the place of humming. See chord.integrations.humming."""

from chord.integrations.humming import check_import

check_import()
