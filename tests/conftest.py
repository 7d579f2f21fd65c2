"""For all tests: hypothesis looks where it looked before, so that a run says something about the code alone.

And what a run spends on itself is kept small: reading certificates, and looking for garbage where there is none.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True)
# HYPOTHESIS_PROFILE=default searches anew.
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

_CHILDREN = Path(__file__).parent / "support" / "children"
# Nothing here speaks TLS to anybody but pip, and to read the system's certificates takes each new client 30 ms.
os.environ.setdefault("SSL_CERT_FILE_OF_PIP", os.environ.get("SSL_CERT_FILE", ""))
os.environ["SSL_CERT_FILE"] = str(_CHILDREN / "nobody.pem")
# For what tests start: see the module in there. A worker of xdist has it from the process that started it.
if str(_CHILDREN) not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_CHILDREN), os.environ.get("PYTHONPATH"))))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported for the tests stays: the collector does not look at it, now or later. For them it is as usual."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(700, 10, 10)
        gc.enable()
