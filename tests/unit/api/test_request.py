import orjson
import pytest

from slotkeeper.api.document import NotOurs
from slotkeeper.api.head import Api
from slotkeeper.api.request import answer_cap, parse

HELLO = [{"role": "user", "content": "hello"}]


def ask(api=Api.CHAT, **body):
    return parse(api, orjson.dumps(body))


DEEP_INPUT = (
    b'{"messages":[{"role":"assistant","content":[{"type":"tool_use","input":'
    + b"[" * 1000
    + b"]" * 1000
    + b"}]}]}"
)


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (Api.CHAT, b"not json"),
        (Api.CHAT, b"[]"),
        (Api.CHAT, b"{}"),
        (Api.CHAT, b'{"messages":"x"}'),
        (Api.CHAT, b'{"messages":["x"]}'),
        (Api.CHAT, b'{"messages":[],"tools":' + b"[" * 400 + b"]" * 400 + b"}"),
        (Api.COMPLETION, b"{}"),
        (Api.COMPLETION, b'{"prompt":7.5}'),
        (Api.COMPLETION, b'{"prompt":[1,true]}'),
        (Api.COMPLETION, b'{"prompt":null}'),
        (Api.INFILL, b"{}"),
        (Api.MESSAGES, b"{}"),
        (Api.RESPONSES, b'{"input":1}'),
        (Api.TASK, b'{"input":"x"}'),
        (Api.MESSAGES, DEEP_INPUT),
    ],
)
def test_an_unreadable_body_is_left_to_the_engine(api, body):
    with pytest.raises(NotOurs):
        parse(api, body)


def test_the_chat_body_for_rendering_has_no_sampling_fields():
    body = {"messages": HELLO, "tools": [], "model": "m", "reasoning_effort": "low", "response_format": {}}
    sampling = {"temperature": 1, "stream": True, "max_tokens": 3, "seed": 1, "id_slot": 1, "n": 2}
    got = ask(**body, **sampling)
    assert got.chat == body
    assert got.stream
    assert got.prompt is None


def test_the_messages_api_drops_the_fields_that_the_engine_drops():
    got = ask(Api.MESSAGES, messages=HELLO, id_slot=1, n=3, cache_prompt=False, stream=True)
    assert (got.claim.id_slot, got.claim.copies, got.cache_prompt, got.stream) == (None, 1, True, True)
    cached = [
        ask(messages=HELLO, **field).cache_prompt
        for field in ({}, {"cache_prompt": None}, {"cache_prompt": False})
    ]
    assert cached == [True, True, False]


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("text", "text"),
        ("", ""),
        ([1, 2], [1, 2]),
        (["a", 5, "b"], ["a", 5, "b"]),
        (["only"], "only"),
        ([[1, 2]], [1, 2]),
        ([["a", 5]], ["a", 5]),
        ({"prompt_string": "text"}, "text"),
        ({"prompt_string": "text", "multimodal_data": []}, "text"),
    ],
)
@pytest.mark.parametrize("api", [Api.COMPLETION, Api.COMPLETIONS])
def test_a_single_prompt_is_read_in_each_of_its_forms(api, prompt, read):
    got = ask(api, prompt=prompt)
    assert (got.prompt, got.claim.copies, got.media, got.chat, got.hash_chain) == (read, 1, False, None, ())


@pytest.mark.parametrize(("prompt", "copies"), [(["a", "b"], 2), ([[1], [2], "c"], 3), ([], 1)])
def test_several_prompts_are_not_read_and_take_several_slots(prompt, copies):
    got = ask(Api.COMPLETION, prompt=prompt)
    assert (got.prompt, got.claim.copies) == (None, copies)


def test_a_request_with_media_has_a_hash_chain_but_no_chat_to_tokenize():
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    got = ask(messages=[{"role": "user", "content": [{"type": "text", "text": "see"}, picture]}])
    assert got.media
    assert got.chat is None
    assert len(got.hash_chain) == 2
    raw = ask(Api.COMPLETION, prompt={"prompt_string": "<x>", "multimodal_data": ["aGk="]})
    assert (raw.media, raw.prompt) == (True, None)
    filling = ask(Api.INFILL, input_prefix="a", input_suffix="b", id_slot=2)
    assert (filling.prompt, filling.chat, filling.claim.id_slot) == (None, None, 2)


@pytest.mark.parametrize(
    ("field", "scales"),
    [
        ({}, None),
        ({"lora": None}, None),
        ({"lora": []}, None),
        ({"lora": [{"id": 0, "scale": 0.5}]}, ((0, 0.5),)),
        ({"lora": [{"id": 1, "scale": 2}, {"id": 0, "scale": 1}]}, ((0, 1.0), (1, 2.0))),
        ({"lora": [{"id": 0, "scale": 1}, {"id": 0, "scale": 0}]}, ((0, 0.0),)),  # the last one counts
        ({"lora": [{"id": True, "scale": "1"}]}, ((1, 0.0),)),
        ({"lora": [{"id": "0", "scale": 1}, 5]}, ((-1, 0.0),)),  # no adapter has that number
    ],
)
def test_lora_scales_are_read_as_the_engine_reads_them(field, scales):
    body = orjson.dumps({"messages": [{"role": "user", "content": "x"}], **field})
    assert parse(Api.CHAT, body).claim.lora == scales
    assert parse(Api.MESSAGES, body).claim.lora is None  # the engine drops it there (engine.md T5)


@pytest.mark.parametrize(
    ("api", "doc", "cap"),
    [
        (Api.CHAT, {"max_tokens": 100}, 100),
        (Api.CHAT, {"max_completion_tokens": 100, "n_predict": 50}, 50),
        (Api.CHAT, {"max_output_tokens": 100}, None),
        (Api.CHAT, {"max_tokens": -1}, None),
        (Api.CHAT, {"max_tokens": None, "n_predict": 0}, 0),
        (Api.CHAT, {"max_tokens": "100"}, None),
        (Api.CHAT, {}, None),
        (Api.RESPONSES, {"max_output_tokens": 100}, 100),
        (Api.MESSAGES, {"max_tokens": 32000}, 32000),
        (Api.TASK, {"max_tokens": 100}, None),
    ],
)
def test_the_maximum_answer_length_is_read_under_the_field_names_of_each_api(api, doc, cap):
    assert answer_cap(api, doc) == cap
