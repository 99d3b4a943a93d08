"""`slotkeeper doctor`: reports what an engine can and cannot do, or whether two engines share snapshots."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slotkeeper.addresses import AUTO
from slotkeeper.cli.measuring import NotMeasuredError, Speeds, measure
from slotkeeper.cli.terminal import size
from slotkeeper.engine.answers import SAID, EngineError, EngineGoneError, Health, NoFilesError, Odds
from slotkeeper.engine.canary import LIKELIEST, TEXT
from slotkeeper.engine.child.memory import checkpoint_bytes, free_memory
from slotkeeper.engine.client import EngineAddress, EngineClient
from slotkeeper.engine.file_canary import swept, unused
from slotkeeper.engine.findings import Finding, Probe, Severity, about_files, examine, probe
from slotkeeper.engine.fingerprint import TOLERANCE, Identity
from slotkeeper.engine.flags import EngineFlags
from slotkeeper.engine.managers import recognise
from slotkeeper.engine.nearby import SEE, NotChosenError, chosen, look, starter_of
from slotkeeper.engine.routers.router_client import RouterClient
from slotkeeper.engine.routers.swap_client import SwapClient
from slotkeeper.engine.traits import Reading, identify, read_answers, read_traits
from slotkeeper.scheduler.policies.router import ModelStatus
from slotkeeper.scheduler.slots.engine_model import EngineTraits, Known
from slotkeeper.scheduler.snapshots.budgets import Budgets, Limits, budgets
from slotkeeper.scheduler.types import Tier
from slotkeeper.store import files
from slotkeeper.store.folders.snapshot_folder import SnapshotFolder, rooms_of
from slotkeeper.store.trouble import ADVICE, SLOW_BYTES_PER_SECOND, StoreError, Trouble, troubles

COLOURS: Final = {Severity.OK: "green", Severity.NOTE: "cyan", Severity.WARN: "yellow", Severity.FAIL: "red"}
TRIAL_BYTES: Final = 32 << 20  # enough that a disk's write cache does not hide how slow it is
CHUNK: Final = 1 << 20


Measured = Callable[[Reading, Speeds], None]


async def doctor(
    upstream: str,
    api_key: str | None,
    console: Console,
    slot_dir: Path | None = None,
    measured: Measured | None = None,
) -> int:
    """Print the findings. Returns 1 when there is a FAIL, or no engine to examine.

    It prefills 32 to 86 tokens in an unused engine whose flags cannot be read. With a folder it also tests
    snapshots: it saves an idle slot's state, and measures how quickly the folder can be written.
    On a router, or on llama-swap, it examines each loaded model. With `measured` it measures the engine's
    speed too, which takes engine time, and calls it with the result; it returns 1 if it cannot do so now.
    `upstream` may be AUTO: the engine of this machine. Of a program that starts llama-server for its users it
    says what can be had there.
    """
    if upstream == AUTO:
        try:
            upstream = chosen(await look()).base
        except NotChosenError as error:
            console.print(f"[red]{escape(str(error))}[/]")
            return 1
        console.print(f"Found {upstream}.")
    async with EngineClient(upstream, api_key=api_key) as client:
        health = await client.health()
    if health is Health.FOREIGN and (known := await recognise(upstream)):
        console.print(f"[red]{escape(known.sentence(upstream))}[/] {SEE}")
        return 1
    if starter := await asyncio.to_thread(starter_of, upstream):
        console.print(f"{starter.name} has started this engine. To keep it useful, {starter.do}. {SEE}")
    if not health.routes:
        return await _examine(EngineAddress.of(upstream), api_key, console, slot_dir, measured=measured)
    swaps = health is Health.SWAPPER
    try:
        async with (SwapClient if swaps else RouterClient)(upstream, api_key=api_key) as router:
            listing = await router.listing()
    except (EngineError, EngineGoneError) as error:
        console.print(f"[red]{escape(str(error))}[/]")
        return 1
    found = []
    for entry in listing.models:
        address = EngineAddress(upstream.rstrip("/"), entry.name, swaps=swaps)
        console.print(f"[bold]{escape(address.engine)}[/]")
        if entry.status is ModelStatus.LOADED:
            found.append(
                await _examine(address, api_key, console, slot_dir, flags=entry.flags, measured=measured)
            )
        else:
            console.print(f"It is {entry.status}: examining it would load it. Send it a request first.")
    return max(found, default=0)


async def _examine(
    address: EngineAddress,
    api_key: str | None,
    console: Console,
    slot_dir: Path | None,
    *,
    flags: EngineFlags | None = None,
    measured: Measured | None = None,
) -> int:
    """Examine one engine; `flags` are known if a router reports them. Returns as `doctor` does."""
    upstream = address.engine
    unfit = await asyncio.to_thread(lambda: list(about_folder(slot_dir))) if slot_dir else []
    usable = slot_dir if not _fails(unfit) else None
    async with EngineClient(address, api_key=api_key) as client:
        health = await client.health()
        if address.swaps and health.wrong:
            console.print("It is not a llama-server: its requests pass through, and no slot is chosen.")
            return 0
        if health not in {Health.OK, Health.SLEEPING}:
            console.print(_not_up(upstream, health))
            return 1
        try:
            seen = await probe(client)
            reading = None
            if health is Health.OK:
                reading = await read_traits(client, flags, slot_dir=usable, may_compute=True, may_read=True)
        except EngineGoneError as error:
            console.print(f"[red]{escape(str(error))}[/]")
            return 1
        except EngineError as error:
            console.print(_refusal(upstream, error))
            return 1
    if reading is None:
        console.print("The engine sleeps; examining it would wake it. Run doctor again when it is awake.")
        return 0
    if usable:
        unfit += [*about_files(reading, flags), *about_room(usable, reading.traits)]
    findings = _examined(reading, seen, unfit if slot_dir else None, routed=bool(address.model))
    console.print(_traits(reading, client.computed))
    console.print(_findings(findings))
    refused = False
    if measured:
        files = usable if reading.files else None
        async with EngineClient(address, api_key=api_key) as client:
            refused = not await _measured(client, reading, files, console, measured)
    return int(_fails(findings) or refused)


async def _measured(
    client: EngineClient, reading: Reading, folder: Path | None, console: Console, measured: Measured
) -> bool:
    """Measure an engine's speed, and pass it on. Returns whether that was possible."""
    try:
        speeds = await measure(client, reading, folder, console)
    except (NotMeasuredError, NoFilesError, EngineError, EngineGoneError) as error:
        console.print(f"[red]Not measured.[/] {escape(str(error))}")
        return False
    measured(reading, speeds)
    return True


def _fails(findings: list[Finding]) -> bool:
    return any(finding.severity is Severity.FAIL for finding in findings)


def _not_up(upstream: str, health: Health) -> str:
    do = "Start llama-server there, or give another --upstream."
    if health.wrong:
        do = "Name llama-server's own port by --upstream."
    return f"[red]{upstream} {SAID[health]}.[/] {do}"


def _refusal(upstream: str, error: EngineError) -> str:
    hint = " Give its key with --engine-api-key." if error.status == 401 else ""
    return f"[red]{upstream} refused: {escape(str(error))}.[/]{hint}"


def about_folder(folder: Path) -> Iterator[Finding]:
    """Yield findings about the folder itself: whether we can write there, and how quickly. Blocks."""
    try:
        with troubles(f"use {folder} for snapshots"):
            SnapshotFolder(folder, Tier.HOT).demand(0)
            rate = written_per_second(folder)
    except StoreError as error:
        yield in_words(error, Severity.FAIL)
        return
    if rate < SLOW_BYTES_PER_SECOND:
        what = f"{folder} takes {rate / 1e6:.1f} MB a second: computing a prompt again is often quicker."
        yield Finding(trap="folder", severity=Severity.WARN, what=what, do=ADVICE[Trouble.SLOW])


def about_room(folder: Path, traits: EngineTraits) -> Iterator[Finding]:
    """Yield a finding if the folder lacks room for the largest states of slots. Blocks briefly."""
    try:
        SnapshotFolder(folder, Tier.HOT).demand(traits.largest_file)
    except StoreError as error:
        yield in_words(error, Severity.WARN)
        return
    with suppress(OSError):
        yield from about_budget(budgets(Limits(), rooms_of({Tier.HOT: folder}), traits.largest_file))


def about_budget(default: Budgets) -> Iterator[Finding]:
    """Yield a finding if the budget that a sidecar takes by default has room for few conversations."""
    if default.small:
        what = (
            f"Without --hot-bytes, snapshots get {size(default.hot)} of this disk: room for {default.fits} "
            f"conversation{'' if default.fits == 1 else 's'} of full context ({size(default.largest)} each)."
        )
        yield Finding(trap="folder", severity=Severity.WARN, what=what, do=default.advice)


def in_words(error: StoreError, severity: Severity) -> Finding:
    do = ADVICE[error.trouble]
    return Finding(trap="folder", severity=severity, what=str(error).removesuffix(do).rstrip(), do=do)


def written_per_second(folder: Path) -> float:
    """Measure the bytes per second that the disk takes, with fsync. Raises OSError."""
    path = folder / files.new_temporary(time.time())
    chunk = secrets.token_bytes(CHUNK)  # random: some file systems compress, and would seem too quick
    started = time.perf_counter()
    try:
        with path.open("xb") as file:
            for _ in range(TRIAL_BYTES // CHUNK):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        return TRIAL_BYTES / (time.perf_counter() - started)
    finally:
        path.unlink(missing_ok=True)


def _examined(
    reading: Reading, seen: Probe, in_files: list[Finding] | None, *, routed: bool
) -> list[Finding]:
    return examine(
        reading.traits,
        reading.flags,
        seen.props,
        slots_ok=seen.slots_ok,
        metrics_ok=seen.metrics_ok,
        slot_save=seen.slot_save,
        files=in_files,
        routed=routed,
        checkpoint_bytes=checkpoint_bytes(reading.header, reading.flags) if reading.header else 0,
        free_bytes=free_memory() if reading.header else None,  # its model is on this machine
    )


def _traits(reading: Reading, computed: int) -> Table:
    traits = reading.traits
    table = Table(title="What this engine is", show_header=False, title_justify="left")
    table.add_row("build", reading.build)
    table.add_row("memory", f"{traits.memory.value}" + (f", window {traits.n_swa}" if traits.n_swa else ""))
    table.add_row("slots", f"{traits.n_slots} of {traits.n_ctx} tokens")
    table.add_row("one KV buffer for all slots", "yes" if traits.unified else "no")
    table.add_row("speculative decoding", "yes" if traits.speculative else "no")
    for flag in traits.flags_seen():
        if flag.how is not Known.DEFAULT:
            how = "read from its process" if flag.how is Known.FLAGS else "found out"
            table.add_row(flag.flag, f"{shown(flag.value)} ({how})")
    if computed:
        table.add_row("tokens computed for this", str(computed))
    for note in reading.notes:
        table.add_row("note", escape(note))
    return table


def shown(value: float | bool) -> str:
    """Return a flag's value as text; for some flags only on or off is known."""
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


def _findings(findings: list[Finding]) -> Table:
    table = Table("", "trap", "what", "what to do", title="Findings", title_justify="left")
    for finding in findings:
        colour = COLOURS[finding.severity]
        table.add_row(
            f"[{colour}]{finding.severity.value}[/]", finding.trap, escape(finding.what), finding.do
        )
    return table


# -- comparing two engines: whether each can continue from states of the other --------------------------
# Both engines continue the same text with the likeliest token, and the logprobs of the likeliest tokens are
# compared at each step until they choose different tokens. Another build, backend, batch size or number of
# threads adds in another order: that changes a logprob by hundredths and may change which of two equal tokens
# wins. Another rope base changes it by tenths.

STEPS: Final = 32  # tokens that each engine generates
BEGINS: Final = (0, 40)  # tokens of the fixed text to skip: this gives two texts of different length
DIFFERS: Final = {
    "model": "They do not have the same model: start both with the same path of one file.",
    "adapters": "They have different LoRA adapters, or different scales for them.",
    "streams": "They have different numbers of slots: give both the same -np.",
}


class UsedError(Exception):
    """The engine has served requests: asking it would overwrite a slot that a next turn can continue."""


@dataclass(frozen=True, slots=True)
class EngineAnswers:
    """An engine's identity and answers: after each text, the likeliest tokens at each step."""

    identity: Identity
    texts: tuple[tuple[Odds, ...], ...]


@dataclass(frozen=True, slots=True)
class Agreement:
    """The result of comparing two engines."""

    differs: tuple[str, ...]  # fields of `Identity` that are not equal
    steps: int  # tokens that were compared
    same: int  # how many of these both engines chose
    largest: float  # the largest difference of a logprob

    @property
    def equal(self) -> bool:
        """Whether the logprobs are equal apart from noise."""
        return self.largest <= TOLERANCE

    @property
    def share(self) -> bool:
        """Whether snapshots of one engine may be offered to the other."""
        return self.equal and not self.differs


async def _continued(client: EngineClient) -> EngineAnswers:
    """Let an engine continue the texts, and erase its slots afterwards if it can.

    Raises UsedError, EngineError and EngineGoneError.
    """
    if not await unused(client, None):
        raise UsedError
    identity = await identify(client, await read_answers(client, None, None), None, None)
    ids = await client.tokenize(TEXT, add_special=False, parse_special=False)
    texts = []
    for begin in BEGINS:
        found = await client.continued(ids[begin:], STEPS, LIKELIEST)
        with suppress(EngineError):  # without --slot-save-path it cannot erase: the text stays in the slot
            await swept(client, found.slot, found.held, None)
        texts.append(found.steps)
    return EngineAnswers(identity, tuple(texts))


def _agreement(one: EngineAnswers, other: EngineAnswers) -> Agreement:
    facts = ("model", "adapters", "streams")
    differs = tuple(name for name in facts if getattr(one.identity, name) != getattr(other.identity, name))
    steps = same = 0
    largest = 0.0
    for mine, theirs in zip(one.texts, other.texts, strict=True):
        for first, second in zip(mine, theirs, strict=False):
            steps, largest = steps + 1, max(largest, _distance(first, second))
            if first[:1] and second[:1] and first[0][0] != second[0][0]:
                break  # after this they continue different texts
            same += 1
    return Agreement(differs, steps, same, largest)


def _distance(one: Odds, other: Odds) -> float:
    """Return the largest difference of a logprob that both have; infinite if the likeliest tokens differ.

    The least likely tokens of one engine may be missing in the other.
    """
    first, second = dict(one), dict(other)
    both = first.keys() & second.keys()
    if len(both) < min(len(first), len(second)) - 1:
        return float("inf")
    return max((abs(first[token] - second[token]) for token in both), default=0.0)


class NotComparedError(Exception):
    """An engine could not be examined; the message says why."""


async def compare(urls: Sequence[str], api_key: str | None, console: Console) -> int:
    """Print whether two engines share snapshots. Returns 0 if they do, else 1."""
    try:
        one, other = await asyncio.gather(*(_answers_of(url, api_key) for url in urls))
    except NotComparedError as error:
        console.print(f"[red]{escape(str(error))}[/]")
        return 1
    found = _agreement(one, other)
    for line in _in_sentences(found):
        console.print(line)
    return int(not found.share)


async def _answers_of(url: str, api_key: str | None) -> EngineAnswers:
    async with EngineClient(url, api_key=api_key) as client:
        health = await client.health()
        if health is not Health.OK:
            raise NotComparedError(f"{url} {SAID[health]}.")
        try:
            return await _continued(client)
        except UsedError:
            raise NotComparedError(
                f"{url} has been used, and the comparison would overwrite a slot: compare right after the "
                "engine's start, before any request."
            ) from None
        except (EngineError, EngineGoneError, NoFilesError) as error:
            raise NotComparedError(f"{url}: {error}") from error


def _in_sentences(found: Agreement) -> Iterator[str]:
    """Yield the findings as sentences."""
    yield f"Texts at temperature 0: {found.same} of {found.steps} tokens are the same."
    noise = "that is noise" if found.equal else "that is more than noise"
    yield f"Logprobs of the likeliest tokens: at most {found.largest:.4f} apart; {noise} (up to {TOLERANCE})."
    yield from (DIFFERS[name] for name in found.differs)
    if found.share:
        yield "They share snapshots: with one slot folder, a conversation of one continues at the other."
    else:
        yield "They do not share snapshots: a conversation that moves is computed again."
