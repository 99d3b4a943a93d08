"""What the operating system decides: no module outside this package asks which one it is.

`posix` (Linux, macOS) and `windows` have the same names.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

if sys.platform == "win32":
    from slotkeeper.system import windows as here
else:
    from slotkeeper.system import posix as here

if TYPE_CHECKING:  # commands that only ask a sidecar start without it
    from asyncio import AbstractEventLoop

apart = here.apart
bytes_on_disk = here.bytes_on_disk
devices_in_memory = here.devices_in_memory
dies_with_us = here.dies_with_us
give = here.give
kill_session = here.kill_session
lock = here.lock
make_private = here.make_private
open_log = here.open_log
open_plain = here.open_plain
raise_descriptors = here.raise_descriptors
read_at = here.read_at
set_modified = here.set_modified
sync_folder = here.sync_folder
takes_text = here.takes_text
user = here.user
watch = here.watch
write_at = here.write_at

INTERRUPT: Final = here.INTERRUPT  # asks a program that we started to end
KILL: Final = here.KILL  # ends it
ENDS: Final = here.ENDS  # by these a person or a service manager ends us
PIPE_BYTES: Final = here.PIPE_BYTES  # that a ready pipe takes at once
HANG_UP: Final[signal.Signals | None] = getattr(signal, "SIGHUP", None)
DAMAGED: Final = frozenset({errno.EIO, errno.EBADMSG, getattr(errno, "EUCLEAN", errno.EIO)})  # of one file

Call = Callable[[], None]


def on_signal(loop: AbstractEventLoop, number: signal.Signals, call: Call) -> Call:
    """Let the loop call `call` at a signal. Returns the function that undoes it. For the main thread."""
    try:
        loop.add_signal_handler(number, call)
    except NotImplementedError:  # Windows
        before = signal.signal(number, lambda *_: _soon(loop, call))
        return lambda: _restore(number, before)
    return lambda: _remove(loop, number)


def _soon(loop: AbstractEventLoop, call: Call) -> None:
    loop.call_soon_threadsafe(call)


def _restore(number: signal.Signals, before: signal._HANDLER) -> None:
    signal.signal(number, before)


def _remove(loop: AbstractEventLoop, number: signal.Signals) -> None:
    loop.remove_signal_handler(number)


def state_folder() -> Path:
    """Return the folder in which programs of this user keep their state."""
    return _of_user("XDG_STATE_HOME", "Library/Application Support", ".local/state")


def cache_folder() -> Path:
    """Return the folder in which programs of this user keep what they can make again."""
    return _of_user("XDG_CACHE_HOME", "Library/Caches", ".cache")


def _of_user(variable: str, on_macos: str, elsewhere: str) -> Path:
    variables = (variable, "LOCALAPPDATA") if sys.platform == "win32" else (variable,)
    named = next(filter(None, map(os.environ.get, variables)), None)
    return Path(named) if named else Path.home() / (on_macos if sys.platform == "darwin" else elsewhere)
