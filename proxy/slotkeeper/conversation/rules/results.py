"""The rule for old tool results that an agent prunes: they stay as they were sent while there is room."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from slotkeeper.conversation.divergence import length
from slotkeeper.conversation.facts import bare
from slotkeeper.conversation.layout import Edit, Layout, Role
from slotkeeper.conversation.pruning import pruned
from slotkeeper.conversation.rules.base import Mode, RuleName, Scene, paired

# Used while no prompt of the conversation has been counted. Code and English have about 3.6; the exact count
# follows before the request is sent (`scheduler.pending`).
CHARACTERS_A_TOKEN: Final = 3


class PrunedResults:
    """Restores pruned results as they were sent. When there is no room, all prunes go through at once.

    What each program does, by its public source code of 2026:

    * opencode, and Kilo Code, which is built on it (`session/compaction.ts`, `prune`): after a turn, results
      that are older than the last two user messages and than the latest 40,000 tokens of results become
      `[Old tool result content cleared]`, if that frees 20,000 tokens. The next turns prune more.
    * Claude Code (microcompact) and Qwen Code (`microcompact.ts`): the same words, for all but the latest
      results (five in Qwen Code) after the conversation has paused. Claude Code also writes
      `<persisted-output>` with a preview. The context editing of Anthropic's API is done by its server: a
      client sends everything, and nothing has to be restored.
    * Hermes (`context_compressor.py`): `[Old tool output cleared to save context space]`,
      `[Duplicate tool output ...]`, or one line that begins with the tool's name in brackets.
    * OpenClaw (`context-pruning`): the first and the last 1,500 characters, dots between them and a note in
      brackets after them; later opencode's words.
    * Gemini CLI (`toolOutputMaskingService.ts`): `<tool_output_masked>` with a preview.
    * Cline (`responses.ts`): an earlier read of a file becomes `[[NOTE] This file read has been removed ...`.
    * SWE-agent (`history_processors.py`): `Old environment output: (N lines omitted)`; OpenHands (observation
      masking): `<MASKED>`. Both for all but the latest results, so that each request masks one more.
    * LangChain (context editing): `[cleared]`; oh-my-pi (`pruning.ts`): `[Output truncated - N tokens]`.
    * Plain cuts: a beginning and perhaps an end, with or without a mark such as `[... truncated ...]`.

    The rule does not restore pairs of call and result that are dropped entirely, nor images in results, nor
    the arguments of calls, which Hermes cuts as well.
    """

    name = RuleName.PRUNED_RESULTS
    default = Mode.OBSERVE
    about = (
        "opencode, Kilo Code, Claude Code, Qwen Code, Hermes, OpenClaw, Gemini CLI, Cline, SWE-agent, and "
        "OpenHands replace old results of tools by a placeholder, one line, or a part of them, some one at a "
        "time. Each time everything behind the result is computed again."
    )
    safe = (
        "The model reads a result as this client sent it before, and never more. Where the context has no "
        "room for that, all that the client has pruned goes through at once, when a user speaks."
    )

    def changes(self, scene: Scene) -> Iterator[Edit]:
        edits: list[Edit] = []
        grown = 0  # characters
        for message, first in paired(scene):
            if found := pruned(message, first):
                edits += found
                grown += len(first.said) - len(message.said)
        if edits and _fits(scene, grown):
            yield from edits


def _fits(scene: Scene, grown: int) -> bool:
    """Whether the prompt has room for `grown` more characters, as estimated from characters per token."""
    room, before = scene.room, scene.before
    if room is None or before is None:
        return False
    characters = length(scene.now) + grown
    if before.tokens is None:
        tokens = characters / CHARACTERS_A_TOKEN
    else:
        tokens = characters * len(before.tokens) / max(1, length(before.sent))
    return tokens + (room.headroom if begins_turn(scene.now) else 0) <= room.limit


def begins_turn(layout: Layout) -> bool:
    """Whether the user speaks in the newest message: it is not a program's reminder and brings no results."""
    newest = layout.messages[-1]
    return newest.role is Role.USER and not newest.answers and any(map(bare, newest.texts))
