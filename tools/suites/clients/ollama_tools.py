# /// script
# dependencies = ["ollama"]
# ///
"""ollama-python: a chat with a tool, streamed, and structured output"""

import json

import ollama
import shared

client = ollama.Client(host=shared.URL)
messages = [{"role": "user", "content": shared.QUESTION}]
for _ in range(2):
    message = {"role": "assistant", "content": "", "tool_calls": []}
    for part in client.chat(model=shared.MODEL, messages=messages, tools=[shared.count_pieces], stream=True):
        message["content"] += part.message.content or ""
        message["tool_calls"] += part.message.tool_calls or []
    messages.append(message)
    for call in message["tool_calls"]:
        result = shared.count_pieces(**call.function.arguments)
        messages.append({"role": "tool", "tool_name": call.function.name, "content": result})
shared.check_answer(messages[-1]["content"])

schema = {"type": "object", "properties": {"pieces": {"type": "integer"}}, "required": ["pieces"], "additionalProperties": False}
answer = client.chat(model=shared.MODEL, messages=messages + [{"role": "user", "content": "Say it as JSON."}], format=schema)
assert json.loads(answer.message.content) == {"pieces": shared.COUNT}, answer.message.content
