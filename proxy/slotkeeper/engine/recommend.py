"""The flags that `slotkeeper up` gives an engine, unless its user gave them: each with its reason."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from slotkeeper.engine.flags import given

# One slot for the conversation, one for what the client does beside it (titles, summaries, a second
# agent), so that a side request need not evict a long prompt. Every further slot costs its full KV.
SLOTS: Final = 2

# An agent's system prompt and tools are 10,000 to 25,000 tokens, so less than this is no real context;
# a model with 128 KiB of KV per token already pays 4 GiB a slot for it.
CONTEXT_TOKENS: Final = 32768

# Measured best on agent-like work; 32 entries fill in eleven turns (engine.md 11).
CHECKPOINTS: Final = 64


def recommended(
    known: Collection[str],
    user: Sequence[str] = (),
    *,
    port: int,
    slot_dir: Path,
    host: str = "127.0.0.1",
    slots: int = SLOTS,
    context_tokens: int = CONTEXT_TOKENS,
    trained_tokens: int = 0,
    eager_thinning: bool = False,
    namespaces: bool = False,
) -> list[str]:
    """The arguments to put before `user`'s own: only flags that the build knows and the user left open.

    Args:
        known: the flags of this build (`EngineBinary.known`).
        user: the arguments after `--`.
        port: where the engine listens.
        slot_dir: the engine's `--slot-save-path`; see `private_folder`.
        host: the address it listens on.
        slots: how many; explicit, because the default shares one KV buffer (engine.md T6).
        context_tokens: of each slot; `-c` is for all of them together (engine.md 6).
        trained_tokens: the model's own limit, 0 = unknown.
        eager_thinning: b10434-class builds drop close checkpoints at every task (engine.md T7).
        namespaces: keys are held apart, so that the RAM cache, which goes by likeness alone, is of no use.
    """
    said = given(user)
    each = min(context_tokens, trained_tokens) if trained_tokens else context_tokens
    flags: list[tuple[str, ...]] = [
        ("--host", host),
        ("--port", str(port)),
        ("--parallel", str(slots)),
        ("--ctx-size", str(each * slots)),
        ("--jinja",),
        ("--slots",),
        ("--metrics",),
        ("--slot-save-path", str(slot_dir)),
        ("--ctx-checkpoints", str(CHECKPOINTS)),
    ]
    if eager_thinning:  # on later builds the default keeps the oldest checkpoint and 0 drops it
        flags.append(("--checkpoint-min-step", "0"))
    if namespaces:
        flags.append(("--cache-ram", "0"))
    return [word for flag in flags if flag[0] in known and flag[0] not in said for word in flag]


def private_folder(path: Path) -> Path:
    """Create a folder that only we can read: slot files hold whole conversations."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)
    return path
