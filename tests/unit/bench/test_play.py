"""Playing a script: its requests, their conversation names, and the replies that it gets."""

from __future__ import annotations

from typing import Any

from slotkeeper.bench.measure import Sample
from slotkeeper.bench.target import SILENCE, Hit, Shot, Target, Turn, play, spoken


class Answers(Target):
    """A target that answers each request with its label; one label fails."""

    def __init__(self, failing: str = ""):
        self.failing = failing
        self.fired: list[Shot] = []

    async def fire(self, shot):
        self.fired.append(shot)
        failed = shot.label == self.failing
        sample = Sample(session=shot.session, label=shot.label, failure="500" if failed else None)
        return Hit(sample=sample, reply=None if failed else {"role": "assistant", "content": shot.label})


def script(told, *turns):
    for turn in turns:
        told.append((yield turn))


def turn(label, session=None):
    return Turn(label=label, messages=({"role": "user", "content": label},), session=session)


async def test_every_reply_is_passed_to_the_script():
    told: list[dict[str, Any]] = []
    await play(script(told, turn("a"), turn("b"), turn("c")), Answers(failing="b"), session="one")
    assert [reply["content"] for reply in told] == ["a", SILENCE["content"], "c"]


async def test_a_turn_may_belong_to_another_session():
    samples = await play(script([], turn("a"), turn("b", "others")), Answers(), session="one")
    assert [sample.session for sample in samples] == ["one", "others"]


async def test_callbacks_are_called_before_and_after_each_turn():
    order, target = [], Answers()

    async def before(each):
        order.append(("before", each.label, len(target.fired)))

    await play(
        script([], turn("a"), turn("b")),
        target,
        session="one",
        before=before,
        sent=lambda shot: order.append(("sent", shot.label, len(target.fired))),
        seen=lambda sample: order.append(("seen", sample.label, len(target.fired))),
    )
    assert order == [
        ("before", "a", 0), ("sent", "a", 0), ("seen", "a", 1),
        ("before", "b", 1), ("sent", "b", 1), ("seen", "b", 2),
    ]  # fmt: skip


def test_a_truncated_tool_call_is_not_sent_back():
    def reply(arguments):
        return {"role": "assistant", "content": "x", "tool_calls": [{"function": {"arguments": arguments}}]}

    assert spoken(reply("{}")) == reply("{}")
    assert spoken(reply('{"path": "a')) == {"role": "assistant", "content": "x"}
