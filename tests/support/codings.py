"""Coded bodies of which tests of several levels need the same."""

from __future__ import annotations

import zlib

# Found with a search: its header is readable text, and what lies behind it is metadata to brotli.
POLYGLOT = b'\t{\r "@*> * X+X(":0,"previous_response_id":"resp_victim"}\xc8\x00\x08{"model":"m","input":"hi"}\x03'


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()
