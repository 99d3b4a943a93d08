"""`slotkeeper lint`: recorded sessions, the rewrites in them, and the exit code."""

from __future__ import annotations

import json
import lzma

import pytest

from slotkeeper.bench.replay import TraceError, read
from slotkeeper.cli.lint import CHARACTERS_A_TOKEN, examined
from slotkeeper.cli.main import main

RULES = "Rules of the house. " * 200
RESULT = "a line of a file that was read\n" * 100
PATH = "/v1/chat/completions"


def body(day, *more, **options):
    """Return a request of an agent with a date in its system text, and a first round of tools."""
    system = f"You are an agent.\nToday's date: 2026-11-{day}\n{RULES}"
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    return {
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": "Fix the parser."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": RESULT},
            *more,
        ],
        **options,
    }


TURN = ({"role": "assistant", "content": "Done."}, {"role": "user", "content": "And the writer?"})


@pytest.fixture
def trace(tmp_path):
    """Write a recording of (session, body), a second apart."""

    def write(*requests, name="day.jsonl", client="agent", agent=None):
        lines = [
            {
                "t": at,
                "client": client,
                "session": session,
                "method": "POST",
                "path": PATH,
                "headers": {"user-agent": agent} if agent else {},
                "body": sent,
            }
            for at, (session, sent) in enumerate(requests)
        ]
        path = tmp_path / name
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        path.write_bytes(lzma.compress(data) if path.suffix == ".xz" else data)
        return path

    return write


@pytest.fixture
def linted(capsys):
    """Run the command; return its exit code and its output."""

    def run(*words):
        code = main(["lint", *map(str, words)])
        return code, capsys.readouterr().out

    return run


def test_the_exit_code_is_0_if_nothing_was_rewritten(trace, linted):
    code, out = linted(trace(("s", body(21)), ("s", body(21, *TURN))))
    assert code == 0
    assert "Nothing was rewritten" in out
    assert "2 requests in 1 sessions." in out


@pytest.mark.parametrize(
    ("agent", "system", "name"),
    [
        ("OpenAI/JS 6.26.0", "You are an expert coding assistant operating inside pi, a harness.", "pi"),
        ("pi/1.5.2 (linux; node/v22.23.3; x64)", "You help.", "pi"),
        ("ai-sdk/openai-compatible/3.0.37 runtime/bun/1.3.13", "You are Cline, an agent.", "cline"),
        ("claude-cli/2.1.332 (external, sdk-cli)", "You are a Claude agent.", "claude-cli"),
        ("claude-cli/0.24.4 (external, cli)", "You are Qwen Code, an agent.", "QwenCode"),
        ("codex_exec/0.171.0 (Debian 12.0.0; x86_64) xterm", "You help.", "codex"),
        ("opencode/1.18.33 ai-sdk/provider-utils/4.0.23", "You help.", "opencode"),
    ],
)
def test_a_program_has_the_name_that_all_views_show(agent, system, name, trace, linted):
    """Not that of the library whose User-Agent it sends."""
    first = {**body(21), "messages": [{"role": "system", "content": system}, *body(21)["messages"][1:]]}
    more = {**first, "messages": [*first["messages"], *TURN]}
    _, out = linted("--json", trace(("s", first), ("s", more), client=agent.partition("/")[0], agent=agent))
    assert [session["client"] for session in json.loads(out)["sessions"]] == [name]


def test_a_changed_date_costs_all_text_behind_it(trace, linted):
    code, out = linted("--json", trace(("s", body(21)), ("s", body(22, *TURN))))
    assert code == 1
    report = json.loads(out)
    assert report["sessions"] == [{"client": "agent", "session": "s", "kinds": {"cold": 1, "rewrite": 1}}]
    (found,) = report["findings"]
    expected = {
        "cause": "date",
        "section": "system",
        "rule": "date",
        "mode": "observe",
        "times": 1,
        "request": 2,
    }
    assert {key: found[key] for key in expected} == expected
    assert "2026-11-21" in found["before"]
    assert "2026-11-22" in found["after"]
    assert len(RULES) + len(RESULT) <= found["characters"] <= len(RULES) + len(RESULT) + 100
    assert found["tokens_about"] == report["tokens_about"] == round(found["characters"] / CHARACTERS_A_TOKEN)


def test_the_text_report_says_what_changed_and_where_and_the_cost_and_the_rule(trace, linted):
    code, out = linted(trace(("s", body(21)), ("s", body(22, *TURN))))
    assert code == 1
    words = " ".join(out.replace("│", " ").split())
    assert "date: a date changed" in words
    assert "system of message 1" in words, "`why` and the dashboard count from 1"
    assert "date (observe)" in words
    assert "Today's date: 2026-11-22" in out
    assert "--rules date=fix" in out


def test_findings_are_sorted_by_cost_and_repeated_findings_share_a_line(trace):
    days = [("s", body(21)), ("s", body(22, *TURN)), ("s", body(23, *TURN, *TURN))]
    tools = [{"type": "function", "function": {"name": name}} for name in ("a", "b")]
    order = [("o", body(21, *TURN, tools=tools)), ("o", body(21, *TURN, *TURN, tools=tools[::-1]))]
    report = examined(
        [read(trace(*days, name="a.jsonl")), read(trace(*order, name="b.jsonl", client="other"))]
    )
    found = [(one.client, one.cause.value, one.times) for one in report.findings]
    assert found == [("agent", "date", 2), ("other", "tool_order", 1)]
    assert report.findings[0].characters > report.findings[1].characters


def test_new_sessions_and_small_changes_are_not_findings(trace, linted):
    other = body(21)
    other["messages"] = [other["messages"][0], {"role": "user", "content": "Another task."}]
    late = body(21, *TURN)
    late["messages"][3]["content"] = RESULT.removesuffix("read\n") + "red\n"
    code, out = linted("--json", trace(("s", body(21)), ("t", other), ("s", late)))
    assert code == 0
    assert json.loads(out)["findings"] == []


def test_a_sub_agent_that_reads_the_same_file_is_not_a_finding(trace, linted):
    tools = [
        {"type": "function", "function": {"name": name, "description": RULES}} for name in ("read", "edit")
    ]
    helper = body(21, tools=tools)
    helper["messages"][0]["content"] = "You survey a repository."
    helper["messages"][1]["content"] = "Survey it."
    code, out = linted("--json", trace(("s", body(21, tools=tools)), ("t", helper)))
    assert code == 0
    assert json.loads(out)["sessions"][1]["kinds"] == {"cold": 1}


def test_a_divergence_between_two_sessions_is_shown_without_a_rule(trace, linted):
    other = body(22)
    other["messages"] = [other["messages"][0], {"role": "user", "content": "Another task."}]
    code, out = linted("--json", trace(("s", body(21)), ("t", other)))
    assert code == 1
    (found,) = json.loads(out)["findings"]
    assert (found["cause"], found["rule"], found["mode"]) == ("date", None, None)


def pruned(*masked, behind=()):
    """Return the same session with a second round of tools; the results at `masked` are pruned."""
    sent = body(21, *body(21)["messages"][2:], *behind)
    for at in masked:
        sent["messages"][at]["content"] = "[Old tool result content cleared]"
    return sent


def test_a_pruned_result_is_reported_with_its_cost_and_what_its_rule_saves(trace, linted):
    requests = [("s", body(21)), ("s", pruned()), ("s", pruned(3, behind=TURN))]
    code, out = linted("--json", trace(*requests))
    assert code == 1
    (found,) = json.loads(out)["findings"]
    assert (found["cause"], found["rule"], found["mode"]) == ("result_pruned", "pruned_results", "observe")
    assert (found["section"], found["message"]) == ("result", 3)
    assert len(RESULT) <= found["characters"] <= len(RESULT) + 100  # the result behind the pruned one
    assert found["saved_about"] == found["tokens_about"]
    assert "--rules pruned_results=fix` would have saved" in linted(trace(*requests))[1]


@pytest.mark.parametrize(("context", "saved"), [(8192, True), (3200, False)])
def test_the_pruning_rule_saves_nothing_if_a_slot_has_no_room(trace, linted, context, saved):
    requests = [("s", body(21)), ("s", pruned()), ("s", pruned(3, behind=TURN))]
    code, out = linted("--json", "--context", context, trace(*requests))
    assert code == 1
    (found,) = json.loads(out)["findings"]
    assert bool(found["saved_about"]) is saved
    assert ("pruned_results=fix" in linted("--context", context, trace(*requests))[1]) is saved


def test_results_that_are_pruned_later_reduce_what_the_pruning_rule_saves(trace):
    """The second pruning comes when there is no room: both results stay pruned from then on."""
    long = {"role": "user", "content": "And the writer? " + RULES}
    behind = (TURN[0], long, TURN[0], TURN[1])
    requests = [("s", pruned()), ("s", pruned(3, behind=TURN[:1])), ("s", pruned(3, 5, behind=behind))]
    trail = [read(trace(*requests))]
    ((ample,), (short,)) = (examined(trail, context).findings for context in (1 << 20, 5000))
    assert ample.characters == short.characters
    assert short.saved < ample.saved


def test_compressed_traces_are_read_and_other_requests_are_counted(trace, linted, tmp_path):
    path = trace(("s", body(21)), ("s", {"prompt": "x"}), ("s", body(22, *TURN)), name="day.jsonl.xz")
    code, out = linted("--json", path)
    assert code == 1
    report = json.loads(out)
    assert (report["requests"], report["others"]) == (2, 1)


def test_an_unreadable_line_is_reported_and_skipped(trace, linted):
    path = trace(("s", body(21)), ("s", body(22, *TURN)))
    path.write_bytes(path.read_bytes() + b"{]\n")
    code, out = linted("--json", path)
    assert code == 1
    (problem,) = json.loads(out)["problems"]
    assert "day.jsonl:3" in problem
    assert "; skipped" in linted(path)[1]


def test_a_file_that_is_not_a_trace_is_a_usage_error(tmp_path, capsys):
    assert main(["lint", str(tmp_path / "nowhere.jsonl")]) == 2
    assert "nowhere.jsonl" in capsys.readouterr().err
    with pytest.raises(TraceError):
        read(tmp_path / "nowhere.jsonl")


def test_text_in_brackets_does_not_style_the_output(trace, linted):
    one, two = body(21), body(22, *TURN)
    for sent in (one, two):
        sent["messages"][0]["content"] = "[bold]You[/] " + sent["messages"][0]["content"]
    assert "[/]" in linted(trace(("[red]s[/]", one), ("[red]s[/]", two)))[1]
