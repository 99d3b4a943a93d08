"""Thousands of bodies and paths, read by the sidecar and by a real engine: both must understand them alike.

`make fuzz`, or `PYTHONPATH=tests:. python -m engine.fuzz_bodies [--count N] [--seed N] [--build b11549]`.

The oracle is cheap: prompts of three tokens and `n_predict` 0, and the engine's answer names the slot. An
engine that is free to choose takes the slot that holds this very prompt, so the body is first sent to a slot
that we choose. For a body that the sidecar would send on, this is compared:

* with our slot: the engine takes that one;
* as it came: whether the engine accepts it, its slot, its tasks, streamed and cached or not;
* without a slot, after the slot that it names holds something else: the engine chooses ours.

A body that the sidecar refuses is never sent on; the number of those that the engine accepts is only printed.
"""

# ruff: noqa: SIM905 - lists of spellings are easier to read as one text

from __future__ import annotations

import argparse
import http.client
import json
import random
import secrets
import socket
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import orjson
from rich.console import Console

from patience import PATIENCE
from slotkeeper.api.document import NotOurs
from slotkeeper.api.head import Api, classify
from slotkeeper.api.request import Claim, NotPlain, claim, load, placed, plain, read
from slotkeeper.engine.child.launch import runs_skulk

SLOTS: Final = 4
PATHS_IN: Final = 20  # one path per this many bodies
IDS: Final = range(10, 400)  # tokens that every tiny model has
NUMBERS: Final = (
    "0 1 2 3 -1 -2 -0 1.0 2.9 -1.5 0.2e1 3E0 1e-1 20e-1 4 7 1e3 4294967297 -4294967294 2147483648 1e-400 "
    "9223372036854775807 9223372036854775810 18446744073709551615"
).split()
NO_NUMBERS: Final = "1e400 01 +1 2. .5 1e 0x1 NaN Infinity - nul True '1'".split()
# C++ does not define their conversion
UNDEFINED: Final = ("1e10", "-1e30", "18446744073709551617", "2147483648.0")
OTHERS: Final = ("true", "false", "null", '"1"', '""', "[]", "[2]", "{}", '{"id_slot":2}')
KEYS: Final = (
    "id_slot",
    "id_slot",
    *"id_slot n n_cmpl cache_prompt stream x Id_slot n_probs".split(),
    "id_slot ",
)
STRINGS: Final = (
    *r"\u0000 \ud800 \udc00\ud800 \ud83d\ude00 \x \/ \" \u00 \"id_slot\":3 \ } , // /*".split(),
    *("\x7f", "\x01", "\t", "\u00e9", "\u2603", "\U0001f600"),
)
BEFORE: Final = (
    b"\xef\xbb\xbf",
    b"\xef\xbb\xbf" * 2,
    b" ",
    b"\n",
    b"\0",
    b"\xff\xfe",
    b"\x0b",
    b"//\n",
    b"[",
)
BEHIND: Final = (b"\0", b'\0{"id_slot":2}', b"\n ", b"x", b"}", b"{}", b"\x0c", b",", b"\xc2\xa0", b"\x1a")
ROUTES: Final = ("/completion", "/completions", "/completio", "/completions/", "/tokenize")
PIECES: Final = (
    *"%u006 %u002f %2f %2F // /./ /../ %2e %00 % %u %U0063 %5c \\ %09 ; %3f %23 # ? + %20 ~ %zz".split(),
    *("%c3%a9", "%256e", "\t", "\x0b", "?id_slot=1"),
)


class Bodies:
    """Makes the bodies of a seed."""

    def __init__(self, seed: int) -> None:
        self._any = random.Random(seed)

    def body(self) -> bytes:
        chance = self._any
        fields = [("prompt", self._prompt()), ("n_predict", "0")]
        fields += [(chance.choice(KEYS), self._value()) for _ in range(chance.choice((0, 1, 1, 2, 2, 3, 5)))]
        if chance.random() < 0.05:
            fields.append(("prompt", self._prompt()))
        if chance.random() < 0.02:
            depth = chance.choice((3, 200, 1000, 1100, 3000))
            fields.append(("x", "[" * depth + "]" * depth))
        chance.shuffle(fields)
        space = chance.choice(("", "", " ", "\r\n\t"))
        inside = ("," + space).join(f'"{self._spelled(key)}"{space}:{space}{value}' for key, value in fields)
        raw = (f"{{{space}{inside}{space}}}").encode()
        if chance.random() < 0.05:
            raw = chance.choice(BEFORE) + raw
        if chance.random() < 0.05:
            raw += chance.choice(BEHIND)
        return self._bitten(raw) if chance.random() < 0.15 else raw

    def path(self) -> str:
        chance, path = self._any, self._any.choice(ROUTES)
        for _ in range(chance.choice((0, 1, 1, 2))):
            at = chance.randrange(1, len(path) + 1)
            path = path[:at] + chance.choice(PIECES) + path[at:]
        letters = []
        for letter in path:
            odds = chance.random()
            known = letter.isalpha() or letter == "/"
            letters.append(
                f"%{ord(letter):02x}"
                if known and odds < 0.05
                else f"%u{ord(letter):04x}"
                if known and odds < 0.08
                else letter
            )
        return "/" + "".join(letters[1:])

    def _prompt(self) -> str:
        """Return prompts of token ids, which share no beginning-of-text. Some bodies have several or none."""
        odds = self._any.random()
        if odds < 0.8:
            return str(self._ids())
        if odds < 0.9:
            return str([self._ids() for _ in range(self._any.randint(1, SLOTS))])
        one, other, *_ = self._ids()
        return self._any.choice(
            (f'[{one},"a b",{other}]', f"[[{one},{other}],{one}]", f"[{one}.5,{other}]", "[]", "7")
        )

    def _ids(self) -> list[int]:
        return self._any.sample(IDS, 3)

    def _value(self) -> str:
        odds = self._any.random()
        if odds < 0.6:
            return self._any.choice(NUMBERS)
        if odds < 0.65:
            return self._any.choice(UNDEFINED)
        if odds < 0.92:
            return self._any.choice(OTHERS)
        if odds < 0.95:
            return self._any.choice(NO_NUMBERS)
        return '"' + "".join(self._any.choices(STRINGS, k=self._any.randint(1, 3))) + '"'

    def _spelled(self, key: str) -> str:
        if self._any.random() < 0.7:
            return key
        at = self._any.randrange(len(key))
        return f"{key[:at]}\\u{ord(key[at]):04{self._any.choice('xX')}}{key[at + 1 :]}"

    def _bitten(self, raw: bytes) -> bytes:
        chance, at = self._any, self._any.randrange(len(raw))
        match chance.randrange(4):
            case 0:
                return raw[:at] + bytes([chance.randrange(256)]) + raw[at + 1 :]
            case 1:
                return raw[:at] + raw[at + 1 :]
            case 2:
                return raw[:at] + bytes([chance.randrange(256)]) + raw[at:]
            case _:
                return raw[:at] + raw[at : at + 12] + raw[at:]


@dataclass(frozen=True, slots=True)
class Took:
    """What an engine did with a body: one slot for each task; none if it refused the body."""

    slots: list[int]
    streamed: bool = False
    cached: int = 0


@dataclass
class Fuzz:
    """Compares the sidecar's reading with one engine with `SLOTS` slots."""

    base: str
    seed: int
    tally: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._made = Bodies(self.seed)
        self._line = self._dial()

    def run(self, count: int) -> Iterator[str]:
        """Return the differences, one line each."""
        try:
            for number in range(count):
                body = self._made.body()
                if wrong := self._body(body):
                    yield f"seed {self.seed}, number {number}: {wrong}: {body!r}"
                if number % PATHS_IN == 0:
                    path = self._made.path()
                    if wrong := self._path(path):
                        yield f"seed {self.seed}, number {number}: {wrong}: {path!r}"
        finally:
            self._line.close()

    # -- bodies ------------------------------------------------------------------------------------

    def _body(self, body: bytes) -> str | None:
        try:
            doc = load(body)
        except NotPlain as why:
            self.tally[f"{why.doubt}, engine {'takes it' if self._ask(body).slots else 'refuses'}"] += 1
            return None
        taken = claim(Api.COMPLETION, doc)
        if taken.copies > 1:
            return self._several(body, taken)
        named = None if taken.id_slot is None else taken.id_slot % 2**64 % SLOTS
        ours = (named or 0) + 1 + len(body) % (SLOTS - 1)
        ours %= SLOTS
        first = self._ask(placed(body, taken, ours))
        came = self._ask(body)
        self.tally["taken" if came.slots else "refused by the engine"] += 1
        if bool(first.slots) != bool(came.slots):
            return f"with a slot {first}, as it came {came}"
        if not came.slots:
            return None
        if first.slots != [ours]:
            return f"sent to slot {ours}: {first}"
        if taken.id_slot is None and _undefined(taken.named):
            return None
        if came.slots != [ours if named is None else named]:
            return f"slot {named}, else {ours}: {came}"
        if named is not None:
            self._fill(named)
        without = self._ask(placed(body, taken, None))
        return (
            self._otherwise(came, doc)
            if without.slots == [ours]
            else f"without a slot, not {ours}: {without}"
        )

    def _several(self, body: bytes, taken: Claim) -> str | None:
        for sent in (body, placed(body, taken, None)):
            took = self._ask(sent)
            if took.slots and len(took.slots) != taken.copies:
                return f"{taken.copies} tasks: {took}"
        self.tally["several taken" if took.slots else "refused by the engine"] += 1
        return None

    def _otherwise(self, took: Took, doc: dict[str, Any]) -> str | None:
        """Return differences in the rest of the reading. The prompt is in the slot already."""
        try:
            ask = read(Api.COMPLETION, doc)
        except NotOurs:
            return None
        if took.streamed != ask.stream or (bool(took.cached) and not ask.cache_prompt):
            return f"streamed {ask.stream}, cached {ask.cache_prompt}: {took}"
        return None

    def _fill(self, slot: int) -> None:
        prompt = [IDS.stop + secrets.randbelow(50), 1 + slot]
        took = self._ask(orjson.dumps({"prompt": prompt, "n_predict": 0, "id_slot": slot}))
        assert took.slots == [slot], "a plain request goes where it says"

    def _ask(self, body: bytes) -> Took:
        try:
            answer, data = self._post(body)
        except (http.client.HTTPException, OSError):  # the engine may close kept connections at any time
            self._line.close()
            self._line = self._dial()
            answer, data = self._post(body)
        if answer.status != 200:
            return Took([])
        if answer.getheader("Content-Type", "").startswith("text/event-stream"):
            events = [orjson.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]
            ends = [event for event in events if event.get("stop")]
            return Took([end["id_slot"] for end in ends], True, _cached(ends))
        told = json.loads(data)
        ends = told if isinstance(told, list) else [told]
        return Took([end["id_slot"] for end in ends], False, _cached(ends))

    def _post(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        self._line.request("POST", "/completion", body, {"Content-Type": "application/json"})
        answer = self._line.getresponse()
        return answer, answer.read()

    def _dial(self) -> http.client.HTTPConnection:
        address = urlsplit(self.base)
        return http.client.HTTPConnection(address.hostname or "", address.port, timeout=PATIENCE)

    # -- paths -------------------------------------------------------------------------------------

    def _path(self, path: str) -> str | None:
        try:
            api = classify("POST", plain(path.partition("#")[0].partition("?")[0]))
        except NotPlain:
            self.tally["path refused"] += 1
            return None
        found = self._found(path)
        self.tally["path found" if found else "path unknown"] += 1
        ours = api is Api.COMPLETION
        return None if found == ours else f"a path that {'takes' if found else 'does not take'} a slot"

    def _found(self, path: str) -> bool:
        """Whether the engine answers a completion at this path. Uses a socket: no client sends such paths."""
        address = urlsplit(self.base)
        body = b'{"prompt":[1,2],"n_predict":0}'
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((address.hostname, address.port), PATIENCE) as line:
            line.sendall(head.encode("utf-8") + body)
            data = b"".join(iter(lambda: line.recv(65536), b""))
        return data.startswith(b"HTTP/1.1 200") and b'"id_slot"' in data


def _undefined(value: Any) -> bool:
    """Whether C++ leaves the conversion of this number to an integer undefined."""
    return isinstance(value, float) and not -(2**31) - 1 < value < 2**31


def _cached(ends: Sequence[dict[str, Any]]) -> int:
    return sum(int(end["timings"]["cache_n"]) for end in ends)


def main() -> int:
    from engine.conftest import start

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100_000, help="bodies for each build")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**32))
    parser.add_argument("--build", action="append", help="b10434, b11549: by default those that run here")
    chosen = parser.parse_args()
    differences, console = 0, Console(soft_wrap=True, highlight=False)
    for build in chosen.build or (["b10434"] if runs_skulk() else []) + ["b11549"]:
        console.print(f"{build}: {chosen.count} bodies, seed {chosen.seed}")
        with tempfile.TemporaryDirectory() as folder:
            engine = start("tiny-dense", build, args=("-np", str(SLOTS), "-c", "4096"), folder=Path(folder))
            try:
                fuzz = Fuzz(engine.base, chosen.seed)
                for line in fuzz.run(chosen.count):
                    differences += 1
                    console.print(line, markup=False)
            finally:
                engine.process.kill()
        console.print("  " + ", ".join(f"{what}: {times}" for what, times in sorted(fuzz.tally.items())))
    console.print(f"{differences} differences")
    return 1 if differences else 0


if __name__ == "__main__":
    raise SystemExit(main())
