"""For all tests: hypothesis looks where it looked before, so that a run says something about the code alone."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True)
# HYPOTHESIS_PROFILE=default searches anew.
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
