"""What an engine's time costs, learned from its own figures, so that files and tokens can be compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SHARE: Final = 0.3  # of a new measurement in the running mean
LEAST_TOKENS: Final = 64  # a shorter prefill measures the round trip
LEAST_BYTES: Final = 64 * 1024
CALL_SECONDS: Final = 0.004  # of a slot action beside its bytes: a round trip and a look at the file


@dataclass(slots=True)
class Rates:
    """Prices are in tokens of prefill: what the engine could have computed in that time.

    Before the first measurement: a small model on a good machine, a state of 64 KiB a token, a disk.
    """

    prefill: float = 1000.0  # tokens a second
    read: float = 1e9  # bytes a second, of a restore
    write: float = 5e8  # bytes a second, of a save
    cold: float = 2e8  # bytes a second, from the cold tier to the hot one
    state: float = 65536.0  # bytes a token
    measured: frozenset[str] = frozenset()

    def told(self, token_bytes: int) -> None:
        """How large a token's state is, by the model's header; 0 = not known."""
        if token_bytes and "state" not in self.measured:
            self.state = float(token_bytes)

    def prefilled(self, tokens: int, seconds: float | None) -> None:
        if seconds and tokens >= LEAST_TOKENS:
            self._learn("prefill", tokens / seconds)

    @property
    def shown(self) -> float | None:
        """Tokens of prefill a second, as learned; None as long as nothing was measured."""
        return self.prefill if "prefill" in self.measured else None

    def restored(self, size: int, seconds: float) -> None:
        if seconds > 0 and size >= LEAST_BYTES:
            self._learn("read", size / seconds)

    def saved(self, size: int, tokens: int, seconds: float) -> None:
        if seconds > 0 and size >= LEAST_BYTES:
            self._learn("write", size / seconds)
        if tokens:
            self._learn("state", size / tokens)

    def size_of(self, tokens: int) -> int:
        """Bytes that a state of so many tokens will have in a file."""
        return int(tokens * self.state)

    def save_seconds(self, tokens: int) -> float:
        return CALL_SECONDS + self.size_of(tokens) / self.write

    def save_price(self, tokens: int) -> float:
        return self.save_seconds(tokens) * self.prefill

    def restore_price(self, size: int, *, cold: bool = False) -> float:
        seconds = CALL_SECONDS + size / self.read + (size / self.cold if cold else 0.0)
        return seconds * self.prefill

    def _learn(self, name: str, value: float) -> None:
        old = getattr(self, name)
        known = name in self.measured
        setattr(self, name, old + SHARE * (value - old) if known else value)
        self.measured |= {name}
