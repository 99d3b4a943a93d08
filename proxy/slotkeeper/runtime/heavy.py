"""Reads heavy bodies in another process: their claims on the engine, and the least length of their prompts.

The parser keeps the interpreter's lock, so in a thread of this process a body of 60 MB would stop the event
loop for seconds (measured), and take several times its size of memory. A process that ends gives all of that
back, and it can be killed when its client leaves. One body is read at a time.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from slotkeeper import system
from slotkeeper.api.document import longest_string
from slotkeeper.api.errors import ClientFault
from slotkeeper.api.head import Api
from slotkeeper.api.request import (
    HEAVY,
    MAX_STRING,
    Claim,
    Doubt,
    NotPlain,
    PromptSize,
    check_encoding,
    check_lists,
    model_of,
    size_of,
    understood,
)

PIECE: Final = 256 * 1024  # bytes written at once
MOST_SAID: Final = 64 * 1024  # bytes of a result: more would be a model's name of megabytes, or the like
COPIES: Final = 5  # times a body's size that reading it takes: its bytes, and text of 4 bytes a character


@dataclass(frozen=True, slots=True)
class Weighed:
    """What was read of a heavy body."""

    claim: Claim
    size: PromptSize
    model: str | None  # as it may be recorded
    longest: int  # characters of its longest string

    @property
    def readable(self) -> bool:
        """Whether this process can parse it, and render its texts, without stopping the event loop."""
        return self.size.text <= HEAVY and self.longest <= MAX_STRING


class Weigher:
    """Reads one heavy body after the other, each in a process of its own."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def __call__(self, api: Api, body: bytes, encoding: str = "") -> Weighed:
        """Read a body. Raises what `request.understood` raises. Cancelling it kills the process."""
        check_encoding(encoding)
        async with self._turn:
            found = await _asked(api, body)
        match found:
            case Weighed():
                return found
            case (Doubt() as doubt, str(message)):
                raise NotPlain(doubt, message)
            case (int(status), str(message)):
                raise ClientFault(message, status=status)
        raise ClientFault("the body takes too much memory to read; send a shorter prompt", status=413)


async def _asked(api: Api, body: bytes) -> Any:
    """Return what the process says of the body; None if it was killed, as for want of memory."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, api.value),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        **system.apart(),  # Ctrl-C is for the sidecar
    )
    try:
        if process.stdin is None or process.stdout is None:
            raise AssertionError("both are pipes")
        with suppress(BrokenPipeError, ConnectionResetError):
            for start in range(0, len(body), PIECE):
                process.stdin.write(body[start : start + PIECE])
                await process.stdin.drain()
            process.stdin.close()
        said = await process.stdout.read()
        return pickle.loads(said) if said else None  # noqa: S301 - written by this module
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def weigh(api: Api, body: bytes) -> Weighed | tuple[Doubt | int, str]:
    """Return what is read of a body, or why it is refused."""
    try:
        doc, claim = understood(api, body, "")
        check_lists(doc)
        return Weighed(claim, size_of(api, doc), model_of(doc), longest_string(doc))
    except NotPlain as why:
        return why.doubt, why.message
    except ClientFault as fault:
        return fault.status, fault.message


def main() -> None:
    said = pickle.dumps(weigh(Api(sys.argv[1]), sys.stdin.buffer.read()))
    if len(said) > MOST_SAID:
        said = pickle.dumps((413, "a field of the body is too long; send a shorter one"))
    sys.stdout.buffer.write(said)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    from slotkeeper.runtime.heavy import main as named  # its classes have the names that the parent knows

    named()
