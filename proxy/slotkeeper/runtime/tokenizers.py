"""The tokenizer of the model that an engine serves: it outlives restarts, with all that it has seen."""

from __future__ import annotations

from typing import Final

from slotkeeper.engine.traits import Reading
from slotkeeper.vocab.remote import TokenizeCall
from slotkeeper.vocab.tokenizer import Tokenizer

SAID: Final = ("chat_template", "bos_token", "eos_token")  # by /props


class Tokenizers:
    """Of one engine."""

    def __init__(self, ask: TokenizeCall) -> None:
        self._ask = ask
        self._last: tuple[tuple[str, ...], Tokenizer] | None = None

    async def fitting(self, reading: Reading) -> Tokenizer:
        """The last one, if the same build serves the same model; else a new one, which is tried out first.

        A model whose file cannot be read here may be another each time.
        """
        said = {
            name: str(reading.props.get(name) or "") for name in ("chat_template", "bos_token", "eos_token")
        }
        model = reading.header.fingerprint if reading.header else ""
        same = (model, str(reading.model_path), reading.build, *said.values())
        if self._last and model and self._last[0] == same:
            return self._last[1]
        tokenizer = await Tokenizer.open(
            self._ask,
            model_path=reading.model_path,
            chat_template=said["chat_template"],
            bos_token=said["bos_token"],
            eos_token=said["eos_token"],
        )
        self._last = (same, tokenizer)
        return tokenizer
