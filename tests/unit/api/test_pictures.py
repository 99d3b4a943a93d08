"""Images in chats of any API: named by a digest of their bytes, or not interpreted."""

from __future__ import annotations

import base64
from hashlib import sha256
from typing import Any

import orjson
import pytest

from slotkeeper.api.head import Api
from slotkeeper.api.pictures import digests, part_of, with_images
from slotkeeper.api.request import Ask, parse

PICTURE = b"\x89PNG\r\n\x1a\n and so on"
DIGEST = sha256(PICTURE).digest()
DATA = base64.b64encode(PICTURE).decode()
URL = f"data:image/png;base64,{DATA}"
WORDS = {"type": "text", "text": "What is it?"}


def image(url: Any = URL) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def asked(api: Api, **body: Any) -> Ask:
    return parse(api, orjson.dumps(body))


def chat(*parts: Any) -> Ask:
    return asked(Api.CHAT, messages=[{"role": "user", "content": [*parts]}])


def test_an_image_is_named_by_the_digest_of_its_bytes():
    ask = chat(image(), WORDS)
    assert ask.chat["messages"] == [{"role": "user", "content": [part_of(DIGEST), WORDS]}]
    assert [(picture.digest, picture.data) for picture in ask.images] == [(DIGEST, DATA)]
    assert digests(ask.chat) == [DIGEST]
    assert not ask.media
    (picture,) = ask.images
    back = with_images(ask.chat, {picture.digest: picture}.__getitem__)
    assert back["messages"][0]["content"] == [image(), WORDS]


def test_the_bytes_of_an_image_change_the_hash_chain_and_its_media_type_does_not():
    same, other = chat(image(f"data:image/jpeg;base64,{DATA}")), chat(image(URL.replace(DATA, "aGk=")))
    assert same.chat == chat(image()).chat
    assert same.hash_chain == chat(image()).hash_chain != other.hash_chain


@pytest.mark.parametrize(
    "part",
    [
        image("http://localhost/a.png"),
        image("https://localhost/a.png"),
        image("file:///a.png"),
        image(DATA),  # the engine accepts plain base64, but the text may be something else
        image(URL.replace("base64,", "")),
        image(f"data:text/plain;base64,{DATA}"),
        image(URL + "\n"),
        image(URL + "=junk"),
        image(f"{URL[:-8]}\n{URL[-8:]}"),
        image("data:image/png;base64,_-_-"),
        image("data:image/png;base64,AAA"),
        image("data:image/png;base64,"),
        image(7),
        {"type": "image_url", "image_url": URL},
        {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}},
        {"type": "video_url"},
        {"type": 7},
        {},
        "text",
    ],
)
def test_an_image_that_cannot_be_identified_leaves_no_chat(part):
    ask = chat(image(), part)
    assert ask.chat is None
    assert ask.images == ()
    assert ask.hash_chain


def test_images_of_the_messages_api_are_named():
    source = {"type": "base64", "media_type": "image/png", "data": DATA}
    result = {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image", "source": source}]}
    ask = asked(
        Api.MESSAGES,
        messages=[{"role": "user", "content": [{"type": "image", "source": source}, WORDS, result]}],
    )
    assert digests(ask.chat) == [DIGEST, DIGEST]
    url = {"type": "image", "source": {"type": "url", "url": "http://localhost/a.png"}}
    assert asked(Api.MESSAGES, messages=[{"role": "user", "content": [url]}]).chat is None


def test_images_of_the_responses_api_are_named():
    parts = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "What is it?"}]
    assert digests(asked(Api.RESPONSES, input=[{"role": "user", "content": parts}]).chat) == [DIGEST]


def test_an_image_name_sent_by_a_client_does_not_refer_to_another_image():
    """A client that sends a name as if it were an image has sent an image of 32 bytes."""
    ask = chat(part_of(DIGEST))
    assert digests(ask.chat) == [sha256(DIGEST).digest()]
