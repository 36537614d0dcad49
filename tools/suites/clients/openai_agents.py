# /// script
# dependencies = ["openai-agents"]
# ///
"""openai-agents through Responses and through chat completions: a tool and an answer"""

import agents
import shared
from openai import AsyncOpenAI

agents.set_tracing_disabled(True)
client = AsyncOpenAI(base_url=shared.API)
for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
    shared.calls.clear()
    model = kind(model=shared.MODEL, openai_client=client)
    agent = agents.Agent(name="clerk", model=model, tools=[agents.function_tool(shared.count_pieces)])
    result = agents.Runner.run_sync(agent, shared.QUESTION)
    print(kind.__name__, result.new_items)
    shared.check_answer(result.final_output)
