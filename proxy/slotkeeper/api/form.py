"""The model that a form with files names, as llama-swap reads it. llama-server reads no model in a form."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Final

PARTS: Final = 1000  # of a form are read; llama-swap refuses more
_BOUNDARY: Final = re.compile(r'multipart/form-data\b.*?;\s*boundary=(?:"([^"]+)"|([^\s;"]+))', re.IGNORECASE)
_MODEL: Final = re.compile(
    rb"^content-disposition:.*;\s*name=\"?model\"?\s*(?:;|$)", re.IGNORECASE | re.MULTILINE
)


def named_in_form(content_type: str, form: bytes) -> str | None:
    """Return the text field `model` of a form; None if it has none."""
    found = _BOUNDARY.search(content_type)
    if found is None:
        return None
    delimiter = b"--" + (found[1] or found[2]).encode()
    for head, value in islice(_parts(form, delimiter), PARTS):
        if _MODEL.search(head) and b"filename" not in head:
            return form[value].decode(errors="replace")
    return None


def _parts(form: bytes, delimiter: bytes) -> Iterator[tuple[bytes, slice]]:
    """Yield the head of each part, and where its value is."""
    at = form.find(delimiter)
    while at >= 0:
        begin = at + len(delimiter)
        blank, end = form.find(b"\r\n\r\n", begin), form.find(b"\r\n" + delimiter, begin)
        if not 0 <= blank < end:
            return
        yield form[begin:blank].replace(b"\r", b""), slice(blank + 4, end)
        at = end + 2
