# /// script
# dependencies = ["anthropic"]
# ///
"""Anthropic's Python SDK: its tool runner, plain and streamed"""

import anthropic
import shared

client = anthropic.Anthropic(base_url=shared.URL, api_key="none")
tool = anthropic.beta_tool(shared.count_pieces)
for stream in (False, True):
    shared.calls.clear()
    runner = client.beta.messages.tool_runner(
        model=shared.MODEL, max_tokens=300, tools=[tool], messages=[{"role": "user", "content": shared.QUESTION}], stream=stream
    )
    for turn in runner:
        message = turn.get_final_message() if stream else turn
        print(message.content)
    shared.check_answer(message.content[-1].text)
