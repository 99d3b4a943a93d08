"""The model that a form with files names."""

from __future__ import annotations

import pytest

from slotkeeper.api.request import FORM_PARTS, named_in_form

TYPE = "multipart/form-data; boundary=xx"


def part(head: str, value: bytes = b"a") -> bytes:
    return b"--xx\r\nContent-Disposition: form-data; " + head.encode() + b"\r\n\r\n" + value + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--xx--\r\n"


@pytest.mark.parametrize("kind", [TYPE, 'Multipart/Form-Data; charset=utf-8; Boundary="xx"'])
@pytest.mark.parametrize("head", ['name="model"', "name=model", 'name="model"; x=y'])
def test_the_field_is_found_behind_a_file_of_any_bytes(kind: str, head: str) -> None:
    file = part('name="file"; filename="model"', b'\r\n\r\nname="model"\r\n\r\nb--xx\r\n')
    assert named_in_form(kind, form(file, part(head, b"writer"))) == "writer"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/json", form(part('name="model"'))),
        ("multipart/form-data", form(part('name="model"'))),
        (TYPE, b""),
        (TYPE, part('name="model"')[:-3]),
        (TYPE, form(part('name="models"'), part('filename="model"'))),
        (TYPE, form(part('name="model"; filename="a"'))),
        (TYPE, b"--xx\r\nname=model--xx"),
        (TYPE, form(*[part('name="x"')] * FORM_PARTS, part('name="model"'))),
    ],
)
def test_without_a_whole_text_field_there_is_no_name(kind: str, body: bytes) -> None:
    assert named_in_form(kind, body) is None
