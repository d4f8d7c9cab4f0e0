"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)  # the first example pays for imports, and machines are busy
settings.load_profile("no deadline")
