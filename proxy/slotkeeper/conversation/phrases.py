"""Texts of clients' programs: first words of side requests (titles, summaries), words around dates and facts.

They were recorded from real clients, or come from the text of their published programs. A text is a side
request's only if it begins with such words: a user who writes about one is not mistaken for one.

Words around facts are anchored to the start of a line, after an optional list mark. A pattern describes only
how a fact begins, within a line or two, and its time grows linearly with their length. `layout` looks for
ends that may be far away and reads each part of a text once: some texts are made to be slow.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

SUMMARY_ASKED: Final = (  # by a user message
    "CRITICAL: Respond with text only",  # mistral-vibe
    "CRITICAL: Respond with TEXT ONLY",  # Claude Code
    "You are performing a CONTEXT CHECKPOINT COMPACTION",  # codex
    "Your task is to create a detailed summary of the conversation so far",  # Claude Code
    "Here is the conversation so far:\n\n<conversation>",  # opencode
)
SUMMARIZER: Final = (  # a system text
    "You are a context summarization agent",  # opencode
    "You are a context summarization assistant",  # pi
    "You are the component that summarizes internal chat history",  # qwen-code
    "*Briefly* summarize this partial conversation",  # aider
    "You are a helpful AI assistant tasked with summarizing conversations",  # Claude Code
)
SUMMARIZED: Final = (  # the first words of a history that was replaced
    "You are continuing a trajectory after a context compaction",  # mistral-vibe
    "Another language model started to solve this problem",  # codex
    "<system>Previous context has been compacted",  # kimi
    "The conversation history before this point was compacted",  # pi
    "What did we do so far?",  # opencode
    "This session is being continued from a previous conversation",  # Claude Code
)
TITLE_ASKED: Final = (  # by a user message, or by a system text
    "Generate a title for this conversation",  # opencode
    "You are a title generator",  # opencode
    "### Task:\nGenerate a concise",  # Open WebUI
    "Summarize this coding conversation in under 50 characters",  # Claude Code
    "Analyze if this message indicates a new conversation topic",  # Claude Code
    "Generate a concise, sentence-case title",  # Claude Code
)
ASIDE: Final = (  # by a user message
    "[SUGGESTION MODE",  # qwen-code, Claude Code
    *TITLE_ASKED,
    "### Task:\nGenerate 1-3 broad tags",  # Open WebUI
    "### Task:\nSuggest 3-5 relevant follow-up",  # Open WebUI
    "### Task:\nPredict 3-5 useful messages",  # Open WebUI
    "### Task:\nYou are an autocompletion system",  # Open WebUI
)
ASIDE_SYSTEM: Final = (
    *TITLE_ASKED,
    "You are an expert software engineer that generates concise, one-line Git commit messages",  # aider
    "You are an assistant for performing a web search tool use",  # Claude Code
)
FILES: Final = (  # a user message that a client refreshes from the disk
    "Here are summaries of some files present in my git repository",  # aider
    "I have *added these files to the chat*",  # aider
    "Here are some READ ONLY files",  # aider
)
EXAMPLES: Final = (  # a client's examples in the role of a user
    "Change get_factorial() to use math.factorial",  # aider
    "Refactor hello() into its own file.",  # aider
    "I switched to a new code base.",  # aider
    "I added these files to the chat",  # aider
)
PRUNED: Final = (  # the beginnings of texts that replace the result of a tool
    "[Old tool result content cleared",  # opencode, Kilo Code, Claude Code, Qwen Code, OpenClaw
    "[Old tool output cleared to save context",  # Hermes
    "[Duplicate tool output",  # Hermes
    "[[NOTE] This file read has been removed to save space",  # Cline
    "<persisted-output>",  # Claude Code
    "<tool_output_masked>",  # Gemini CLI
    "Old environment output: (",  # SWE-agent
    "<MASKED>",  # OpenHands
    "[cleared]",  # LangChain
    "[Output truncated - ",  # oh-my-pi
)
LEFT_OUT: Final = (  # in lower case: the words that mark where a part of a result was removed
    "...",
    "…",
    "truncated",
    "trimmed",
    "omitted",
    "elided",
    "clipped",
    "removed",
    "compacted",
    "compressed",
)
HIDDEN: Final = ("redact", "confidential")  # in lower case: marks what is removed on purpose


# -- words around facts in prompts, client by client ---------------------------------------------------


class FactKind(StrEnum):
    """The kind of a fact that changes in prompts."""

    DATE = "date"
    CLOCK = "clock"
    CWD = "cwd"
    GIT = "git_status"
    ENVIRONMENT = "environment"
    MEMORY_FILE = "memory_file"
    COUNTDOWN = "countdown"
    NONCE = "nonce"
    REMINDER = "reminder"


@dataclass(frozen=True, slots=True)
class PhraseForm:
    """One form in which a client writes one kind of fact."""

    kind: FactKind
    anchor: str  # in every such fact, rare elsewhere: searched first, because that is cheap
    pattern: re.Pattern[str]  # from the start of the anchor's line; the fact is group `fact`, else all
    close: str = ""  # a block: from the anchor to the end of this text, with any content
    ends: str = ""  # the fact ends with the first of these; without one it is no fact
    last_line: str = ""  # the same for a whole line, formatted with the pattern's groups
    until: tuple[str, ...] = ()  # the fact ends before the first of these, else with the text
    programs: bool = False  # a block that only programs write: also searched in user texts


def _form(kind: FactKind, anchor: str, pattern: str, *until: str, **more: Any) -> PhraseForm:
    return PhraseForm(kind, anchor, re.compile(pattern, re.DOTALL), until=until, **more)


_ANYTHING: Final = re.compile("")
# A line of a list or of plain text, before its key.
_LINE: Final = r"[ \t]*(?:[-*] |\d+\. )?"
_DAY: Final = (
    r"(?:\d{4}-\d\d-\d\d(?: \([A-Z][a-z]+\))?|\d{1,2}/\d{1,2}/\d{4}"
    r"|(?:[A-Z][a-z]+,? )?[A-Z][a-z]{2,8} \d{1,2},? \d{4})"
)
_ZONE: Final = r"(?:Z|[+-]\d\d:?\d\d| \(?[A-Z]{2,5}\)?)"
_TIME: Final = rf"(?:T|,? (?:at )?)\d{{1,2}}:\d\d(?::\d\d)?(?:\.\d+)?(?: ?[AP]M)?{_ZONE}?"
_MOMENT: Final = rf"(?P<value>`?{_DAY}(?P<time>{_TIME})?`?)"

# The names under which clients look for the user's own instructions.
_NAME: Final = r"[^\n]*?(?:AGENTS|CLAUDE|QWEN|GEMINI|CONTEXT)(?:\.local)?\.md"


def _date(anchor: str, key: str = "") -> PhraseForm:
    return _form(FactKind.DATE, anchor, rf"{_LINE}(?P<fact>{key or re.escape(anchor)}{_MOMENT})")


def _line(kind: FactKind, key: str) -> PhraseForm:
    """Return the form of a line such as `Platform: linux`."""
    return _form(kind, f"{key}: ", rf"{_LINE}(?P<fact>(?P<label>{re.escape(key)}): (?P<value>[^\n]*\S))")


def _block(kind: FactKind, tag: str) -> PhraseForm:
    """Return the form of a block in its own tags; its content is not searched for facts."""
    return PhraseForm(kind, f"<{tag}>", _ANYTHING, close=f"</{tag}>", programs=True)


_GIT: Final = (
    r"(?:(?:Current branch|Main branch[^:\n]*|Git user):[^\n]*\n*)*"
    r"(?:Status:(?:\n[^\n]+)*\n*)?(?:Recent commits:(?:\n[0-9a-f]{6,40} [^\n]*)*)?"
)

FORMS: Final = (
    _block(FactKind.REMINDER, "system-reminder"),
    _block(FactKind.ENVIRONMENT, "environment_context"),  # codex
    _block(FactKind.ENVIRONMENT, "environment_details"),  # roo, older cline
    _block(FactKind.MEMORY_FILE, "memory_context"),  # Open WebUI
    _block(FactKind.COUNTDOWN, "system_warning"),
    _block(FactKind.COUNTDOWN, "budget:token_budget"),
    _form(FactKind.COUNTDOWN, "# Context Window Usage", r"# Context Window Usage\n(?P<value>[^\n]*)"),
    _form(FactKind.NONCE, "x-anthropic-billing-header:", r"x-anthropic-billing-header:(?P<value>[^\n]*)"),
    _date("Today's date: "),
    _date("Today's date is "),
    _date("Current date: "),
    _date("The current date is: "),
    _date("The current date is "),
    _date("Date: "),
    _date("Current date and time: "),
    _date("The current date and time", r"The current date and time(?: in ISO format)?(?: is|:) "),
    _date("Current time: "),
    _line(FactKind.CWD, "Working directory"),
    _line(FactKind.CWD, "Primary working directory"),
    _line(FactKind.CWD, "Current working directory"),
    _line(FactKind.CWD, "Current Working Directory"),
    _line(FactKind.CWD, "Working Directory"),
    _line(FactKind.CWD, "Workspace root folder"),
    _line(FactKind.CWD, "Absolute path"),  # mistral-vibe
    _form(  # kimi-cli
        FactKind.CWD,
        "The current working directory is `",
        r"The current working directory is `(?P<value>[^`\n]*)`",
    ),
    _line(FactKind.ENVIRONMENT, "Platform"),
    _line(FactKind.ENVIRONMENT, "OS Version"),
    _line(FactKind.ENVIRONMENT, "Shell"),
    _line(FactKind.ENVIRONMENT, "IDE"),
    _line(FactKind.ENVIRONMENT, "Is directory a git repo"),
    _line(FactKind.ENVIRONMENT, "Is a git repository"),
    _form(  # kimi-cli
        FactKind.ENVIRONMENT,
        "The directory listing of current working directory is:",
        r"The directory listing of current working directory is:\n+(?P<fence>```+)\n",
        last_line="{fence}",
    ),
    _form(
        FactKind.GIT, "gitStatus: This is ", rf"gitStatus: This is [^\n]*\n+(?P<value>{_GIT})"
    ),  # Claude Code
    _form(FactKind.GIT, "gitContext: This is ", rf"gitContext: This is [^\n]*\n+(?P<value>{_GIT})"),  # vibe
    _form(  # continue
        FactKind.GIT,
        '<context name="gitStatus">',
        r'<context name="gitStatus">',
        ends="</context>",
    ),
    _form(FactKind.GIT, "git: Current branch: ", r"(?P<value>git: Current branch: [^\n]*(?:\ngit: [^\n]*)*)"),
    _form(  # opencode
        FactKind.MEMORY_FILE,
        "Instructions from: ",
        r"Instructions from: (?P<label>[^\n]+)\n",
        "\nInstructions from: ",
        "\nSkills provide specialized instructions",
        "\n<available_skills>",
    ),
    _form(  # pi
        FactKind.MEMORY_FILE,
        "Project-specific instructions and guidelines:",
        r"Project-specific instructions and guidelines:\n+## (?P<label>[^\n]+)\n",
        "\nCurrent date: ",
        "\nThe following skills provide ",
    ),
    _form(  # cline
        FactKind.MEMORY_FILE,
        "## Workspace ",
        rf"## Workspace (?P<label>{_NAME})\n",
        "\n## Workspace ",
        "\n## Global ",
    ),
    _form(  # codex
        FactKind.MEMORY_FILE,
        "# AGENTS.md instructions for ",
        r"# AGENTS\.md instructions for (?P<label>[^\n]+)\n+<INSTRUCTIONS>\n",
        ends="</INSTRUCTIONS>",
        programs=True,
    ),
    _form(  # continue
        FactKind.MEMORY_FILE,
        '<context name="userRules">',
        r'<context name="userRules">\n',
        ends="\n</context>",
    ),
    _form(  # kimi-cli
        FactKind.MEMORY_FILE,
        "<!-- From: ",
        r"<!-- From: (?P<label>[^\n]+) -->\n",
        "\n<!-- From: ",
        "\n````",
    ),
    _form(  # qwen-code, gemini-cli
        FactKind.MEMORY_FILE,
        "--- Context from: ",
        r"--- Context from: (?P<label>[^\n]+) ---\n",
        last_line="--- End of Context from: {label} ---",
    ),
    _form(  # mistral-vibe, Claude Code
        FactKind.MEMORY_FILE,
        "Contents of ",
        rf"Contents of (?P<label>(?>{_NAME}))[^\n]*:\n",  # atomic: only the first name is tried
        "\nContents of ",
        "\nIMPORTANT: this context may or may not be relevant",
        "\n# currentDate",
    ),
)
PROGRAMS: Final = tuple(form for form in FORMS if form.programs)
