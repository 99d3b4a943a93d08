"""Requests laid out one after the other: only unchanged messages are the same objects."""

import pytest

from slotkeeper.api.document import RECENT, RecentRequests, SeenRequest, most_like, seen
from slotkeeper.api.head import Api
from slotkeeper.api.request import lay_out

ASKED = {"role": "user", "content": "Which bolts are low?"}
SAID = {"role": "assistant", "content": "M4."}
ITEM = {"type": "message", "role": "user", "content": "Which bolts are low?"}


def called(value):
    use = {"type": "tool_use", "id": "t1", "name": "stock", "input": {"below": value}}
    return {"role": "assistant", "content": [use]}


def again(api, old, new):
    """Return the layout of a request, after another one."""
    return lay_out(api, new, seen(api, old, lay_out(api, old)))


@pytest.mark.parametrize(
    ("api", "key", "items", "system"),
    [
        (Api.CHAT, "messages", [ASKED, SAID], {}),
        (Api.MESSAGES, "messages", [ASKED, SAID], {"system": "You count bolts."}),
        (Api.RESPONSES, "input", [ITEM, ITEM], {"instructions": "You count bolts."}),
    ],
)
def test_equal_messages_are_reused_and_only_the_rest_is_laid_out(api, key, items, system):
    old, new = ({key: list(part), **system} for part in (items, [*map(dict, items), items[0]]))
    first = lay_out(api, old)
    found = lay_out(api, new, seen(api, old, first))
    assert found == lay_out(api, new)
    count = len(items)
    assert all(a is b for a, b in zip(found.messages[-count - 1 : -1], first.messages[-count:], strict=True))


def test_messages_after_a_changed_message_are_laid_out_again():
    old, new = {"messages": [ASKED, SAID, ASKED]}, {"messages": [ASKED, {**SAID, "content": "M5."}, ASKED]}
    assert again(Api.CHAT, old, new) == lay_out(Api.CHAT, new)


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (0, False)])
def test_values_that_only_python_considers_equal_are_not_reused(one, other):
    old, new = ({"messages": [ASKED, called(value)]} for value in (one, other))
    (call,) = again(Api.MESSAGES, old, new).messages[1].calls
    assert call.arguments["below"] is other


def like(recent, api, client, doc):
    return most_like(recent.of(api, client), api, doc)


def test_the_most_similar_recent_request_of_the_same_client_is_found():
    recent = RecentRequests()
    short, long = {"messages": [ASKED]}, {"messages": [ASKED, SAID, ASKED]}
    for doc in (long, short):
        recent.add(Api.CHAT, "anna", doc, lay_out(Api.CHAT, doc), 10)
    assert like(recent, Api.CHAT, "anna", {"messages": [ASKED, SAID]}).raw is long["messages"]
    assert like(recent, Api.CHAT, "bert", long) is None
    assert like(recent, Api.MESSAGES, "anna", long) is None
    assert like(recent, Api.COMPLETION, "anna", {"prompt": "x"}) is None


class Uncompared(list):
    """Messages that must not be compared."""

    def __iter__(self):
        raise AssertionError("compared")


def test_the_next_turn_is_compared_only_with_the_turn_before_it():
    turns = [ASKED, SAID, ASKED, SAID]
    first, second = (
        seen(Api.CHAT, doc, lay_out(Api.CHAT, doc)) for doc in ({"messages": turns[:n]} for n in (1, 3))
    )
    earlier = SeenRequest(Uncompared(first.raw), first.messages, strict=False)
    assert most_like([second, earlier], Api.CHAT, {"messages": turns}) is second
    assert most_like([earlier, second], Api.CHAT, {"messages": turns}) is second


def test_only_the_latest_requests_are_kept_and_none_with_images():
    recent, doc = RecentRequests(), {"messages": [ASKED]}
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}
    recent.add(Api.CHAT, "anna", doc, lay_out(Api.CHAT, doc), 10)
    for later, kept in (({"messages": [picture]}, True), (doc, False)):
        for _ in range(RECENT):
            recent.add(Api.CHAT, "bert", later, lay_out(Api.CHAT, later), 10)
        assert (like(recent, Api.CHAT, "anna", doc) is not None) == kept


def test_recent_bodies_share_a_size_limit_and_a_larger_body_is_not_kept():
    recent, doc = RecentRequests(limit=100), {"messages": [ASKED]}
    layout = lay_out(Api.CHAT, doc)
    recent.add(Api.CHAT, "anna", doc, layout, 60)
    recent.add(Api.CHAT, "bert", doc, layout, 101)
    assert like(recent, Api.CHAT, "anna", doc)
    assert like(recent, Api.CHAT, "bert", doc) is None
    recent.add(Api.CHAT, "bert", doc, layout, 60)
    assert like(recent, Api.CHAT, "anna", doc) is None
    assert like(recent, Api.CHAT, "bert", doc)
