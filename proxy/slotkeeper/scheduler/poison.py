"""Whether an engine can have reused as many tokens as it says.

A slot may hold other tokens than the engine and we believe: by a fault of the engine, of its memory, or of a
file. The request then goes on from a state that is not its own, and its answer is about something else, maybe
about another client's prompt. The engine's own count shows this where it is higher than possible.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from slotkeeper.scheduler.effects import Poison
from slotkeeper.scheduler.pending import Pending
from slotkeeper.scheduler.ram_cache import parks
from slotkeeper.scheduler.slot_contents import SlotContents
from slotkeeper.scheduler.tokens import Tokens
from slotkeeper.scheduler.tree import PromptTree

SLIP: Final = 64  # tokens by which our account may differ without a fault
Claim = tuple[Poison, int]  # and the most that was possible, in tokens


def impossible(pending: Pending, tree: PromptTree, *, prompt_tokens: int, cached: int) -> Claim | None:
    """None where it is possible, or cannot be judged: others use the engine, or the prompt is not known.

    To be asked before shadow and tree take the request in.
    """
    prompt, plan, base = pending.prompt, pending.plan, pending.base
    if plan is None or prompt is None or len(prompt) != prompt_tokens or not plan.table.private:
        return None
    table = plan.table
    own = max(_most(prompt, (base,)), pending.reached)
    if cached <= own + SLIP:
        return None
    anywhere = max(own, tree.longest(prompt), _most(prompt, (*table.shadow.slots, *table.shadow.ram)))
    if cached > anywhere + table.unknown + SLIP:
        return Poison.UNHEARD, anywhere
    may_load = parks(base, table.traits, base.tokens.lcp(prompt) if base else 0, len(prompt))
    if not plan.pinned or may_load or (base is not None and base.rough):
        return None
    return Poison.FOREIGN, own


def _most(prompt: Tokens, states: Iterable[SlotContents | None]) -> int:
    """Tokens that a prompt can have in common with these; the unknown ones of a state may be its own."""
    most = 0
    for contents in states:
        common = contents.tokens.lcp(prompt) if contents else 0
        opaque = contents.opaque if contents and common == len(contents.tokens) else 0
        most = max(most, common + opaque)
    return most
