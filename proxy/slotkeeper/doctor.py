"""`slotkeeper doctor`: what this engine can and cannot do, and which flags to change."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slotkeeper.engine.client import EngineClient, EngineError, EngineGoneError, Health
from slotkeeper.engine.doctor import Finding, Severity, examine, probe
from slotkeeper.engine.traits import Reading, read_traits

COLOURS: Final = {Severity.OK: "green", Severity.NOTE: "cyan", Severity.WARN: "yellow", Severity.FAIL: "red"}


async def doctor(upstream: str, api_key: str | None, console: Console) -> int:
    """Print the findings. Returns 1 when there is a FAIL, or no engine to look at."""
    async with EngineClient(upstream.rstrip("/"), api_key=api_key) as client:
        health = await client.health()
        if health not in {Health.OK, Health.SLEEPING}:
            said = "is still loading its model" if health is Health.LOADING else "does not answer"
            console.print(f"[red]{upstream} {said}.[/] Start llama-server there, or give another --upstream.")
            return 1
        try:
            seen = await probe(client)
            reading = await read_traits(client) if health is Health.OK else None
        except EngineGoneError as error:
            console.print(f"[red]{escape(str(error))}[/]")
            return 1
        except EngineError as error:
            hint = " Give its key with --engine-api-key." if error.status == 401 else ""
            console.print(f"[red]{upstream} refused: {escape(str(error))}.[/]{hint}")
            return 1
    if reading is None:
        console.print("The engine sleeps; looking closer would wake it. Run doctor again when it is awake.")
        return 0
    findings = examine(
        reading.traits,
        None,
        seen.props,
        slots_ok=seen.slots_ok,
        metrics_ok=seen.metrics_ok,
        slot_save=seen.slot_save,
    )
    console.print(_traits(reading))
    console.print(_findings(findings))
    return int(any(finding.severity is Severity.FAIL for finding in findings))


def _traits(reading: Reading) -> Table:
    traits = reading.traits
    table = Table(title="What this engine is", show_header=False, title_justify="left")
    table.add_row("build", reading.build)
    table.add_row("memory", f"{traits.memory.value}" + (f", window {traits.n_swa}" if traits.n_swa else ""))
    table.add_row("slots", f"{traits.n_slots} of {traits.n_ctx} tokens")
    table.add_row("one KV buffer for all slots", "yes" if traits.unified else "no")
    table.add_row("speculative decoding", "yes" if traits.speculative else "no")
    for note in reading.notes:
        table.add_row("note", escape(note))
    return table


def _findings(findings: list[Finding]) -> Table:
    table = Table("", "trap", "what", "what to do", title="Findings", title_justify="left")
    for finding in findings:
        colour = COLOURS[finding.severity]
        table.add_row(
            f"[{colour}]{finding.severity.value}[/]", finding.trap, escape(finding.what), finding.do
        )
    return table
