"""How a control call to an engine can fail."""

from __future__ import annotations


class EngineError(Exception):
    """The engine answered, and the answer was a refusal."""

    def __init__(self, status: int, message: str, *, foreign: bool = False) -> None:
        """`foreign`: no llama-server answers like this."""
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message
        self.foreign = foreign


class EngineGoneError(ConnectionError):
    """No answer: refused, reset, or silent past the time limit."""


class EngineSilentError(EngineGoneError):
    """Silent past the time limit: it may be gone, or on a machine that is too busy to answer."""


class EngineFrozenError(EngineSilentError):
    """It has answered nothing at all for so long that requests no longer wait."""
