# /// script
# dependencies = ["pydantic-ai-slim[openai]"]
# ///
"""pydantic-ai: a tool with a text answer, then with an output type beside the tool"""

import pydantic
import shared
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Count(pydantic.BaseModel):
    part: str
    pieces: int


model = OpenAIChatModel(shared.MODEL, provider=OpenAIProvider(base_url=shared.API, api_key="none"))
for output in (str, Count):
    shared.calls.clear()
    agent = Agent(model, tools=[shared.count_pieces], output_type=output)
    result = agent.run_sync(shared.QUESTION)
    print(result.all_messages())
    shared.check_answer(str(result.output))
