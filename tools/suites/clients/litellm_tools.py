# /// script
# dependencies = ["litellm"]
# ///
"""LiteLLM: a tool call and its result through chat completions, and through Anthropic's messages"""

import json

import litellm
import shared

TOOL = {
    "type": "function",
    "function": {"name": "count_pieces", "description": shared.DESCRIPTION, "parameters": shared.PARAMETERS},
}
for name, base in (
    (f"openai/{shared.MODEL}", shared.API),
    (f"anthropic/{shared.MODEL}", shared.URL),
    (f"ollama_chat/{shared.MODEL}", shared.URL),
):
    shared.calls.clear()
    messages = [{"role": "user", "content": shared.QUESTION}]
    for _ in range(2):
        answer = litellm.completion(model=name, api_base=base, api_key="none", messages=messages, tools=[TOOL])
        message = answer.choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            result = shared.count_pieces(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(name, messages)
    shared.check_answer(message.content)
