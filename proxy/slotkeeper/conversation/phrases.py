"""The words by which clients' own programs ask beside a conversation, and begin again after a summary.

Recorded from real clients, or from the text of their published programs. Each begins a text, so only starts
are looked at: a user who writes about such a request is not taken for one.
"""

from __future__ import annotations

from typing import Final

from slotkeeper.conversation.requests.layout import Message, Role, Section

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
EXAMPLES: Final = (  # what stands as a user's message, and no user has said
    "Change get_factorial() to use math.factorial",  # aider
    "Refactor hello() into its own file.",  # aider
    "I switched to a new code base.",  # aider
    "I added these files to the chat",  # aider
)
PRUNED: Final = (  # what stands where the result of a tool was
    "[Old tool result content cleared]",  # opencode, Claude Code
)


def says(message: Message, phrases: tuple[str, ...]) -> bool:
    """Whether one of its texts, other than a tool's result, begins so."""
    return any(
        text.section is not Section.RESULT and text.text[:200].lstrip().startswith(phrases)
        for text in message.texts
    )


def user_says(message: Message, phrases: tuple[str, ...]) -> bool:
    return message.role is Role.USER and says(message, phrases)
