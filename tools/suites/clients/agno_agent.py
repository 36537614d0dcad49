# /// script
# dependencies = ["agno", "openai"]
# ///
"""Agno: an agent with a tool"""

import shared
from agno.agent import Agent
from agno.models.openai.like import OpenAILike

model = OpenAILike(id=shared.MODEL, base_url=shared.API, api_key="none")
result = Agent(model=model, tools=[shared.count_pieces], telemetry=False).run(shared.QUESTION)
shared.check_answer(result.content)
