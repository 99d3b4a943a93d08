"""Take one turn of a chat as Open WebUI 0.12.4 does, with its side requests; the chat is kept in `chat.json`.

`python open_webui.py TEXT` runs in the virtual environment of the clients, against the server in `url.txt`.
Open WebUI needs gigabytes of packages, so its requests are sent from here, in its order: a completion while
the user types (by default it is off), the answer as a stream, follow-ups, after the first answer a title, and
tags. Paths, headers, keys and parts of the prompts are those of its files `routers/openai.py`,
`routers/tasks.py`, `utils/task.py` and `utils/middleware.py`; the instructions are ours but for their
beginning, by which Slotkeeper recognises side requests.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, Final

import aiohttp

VERSION: Final = "0.12.4"
CHAT: Final = Path("chat.json")
GUIDELINES: Final = "Judge by the whole history, and write in its language. Give JSON and nothing else. " * 8
TITLE: Final = "Generate a concise title"
TAGS: Final = "Generate 1-3 broad tags"
FOLLOW_UPS: Final = "Predict 3-5 useful messages"
COMPLETION: Final = "You are an autocompletion system."
TITLE_TOKENS: Final = 1000
# The last messages that each of them shows; of follow-ups also the first.
SHOWN: Final = {TITLE: 2, TAGS: 6, FOLLOW_UPS: 4, COMPLETION: 6}

Messages = list[dict[str, str]]


def asked(task: str, messages: Messages, text: str = "") -> str:
    """Return the prompt of a side request: instructions, the end of the chat, and the text to complete."""
    shown = messages[-SHOWN[task] :]
    if task == FOLLOW_UPS and len(messages) > len(shown):
        shown = [messages[0], *shown]
    history = "\n".join(f"{one['role'].upper()}: {one['content']}" for one in shown)
    prompt = f"### Task:\n{task}\n### Guidelines:\n{GUIDELINES}\n"
    prompt += f"### Chat History:\n<chat_history>\n{history}\n</chat_history>"
    return f"{prompt}\n<type>search query</type>\n<text>{text}</text>\n### Output:" if text else prompt


async def post(session: aiohttp.ClientSession, **body: Any) -> str:
    """Return the text of an answer. Raises ClientResponseError."""
    async with session.post("v1/chat/completions", data=json.dumps(body)) as answer:
        answer.raise_for_status()
        if not body["stream"]:
            return str((await answer.json())["choices"][0]["message"]["content"])
        lines = [line async for line in answer.content if line.startswith(b"data: {")]
    choices = (json.loads(line.removeprefix(b"data: "))["choices"] for line in lines)
    return "".join(choice[0]["delta"].get("content") or "" for choice in choices if choice)


async def turn(url: str, text: str) -> str:
    messages: Messages = json.loads(CHAT.read_text()) if CHAT.exists() else []
    headers = {"Content-Type": "application/json", "Authorization": "Bearer none"}
    # Open WebUI keeps connections; the engine alone closes one after a stream, and the next request may fail.
    single = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(f"{url}/", headers=headers, connector=single) as session:

        async def side(task: str, typed: str = "", **more: Any) -> None:
            prompt = [{"role": "user", "content": asked(task, messages, typed)}]
            await post(session, model="local", messages=prompt, stream=False, **more)

        await side(COMPLETION, text[: len(text) // 2])
        messages.append({"role": "user", "content": text})
        answer = await post(session, stream=True, model="local", messages=messages)
        messages.append({"role": "assistant", "content": answer})
        CHAT.write_text(json.dumps(messages))
        await side(FOLLOW_UPS)
        if len(messages) == 2:
            await side(TITLE, max_tokens=TITLE_TOKENS)
        await side(TAGS)
    return answer


if __name__ == "__main__":
    print(asyncio.run(turn(Path("url.txt").read_text(), sys.argv[1])))  # noqa: T201 - the test reads it
