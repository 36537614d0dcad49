# /// script
# dependencies = ["haystack-ai"]
# ///
"""Haystack: its agent over an OpenAI chat generator"""

import shared
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function

model = OpenAIChatGenerator(model=shared.MODEL, api_base_url=shared.API)
agent = Agent(chat_generator=model, tools=[create_tool_from_function(shared.count_pieces)], max_agent_steps=4)
result = agent.run(messages=[ChatMessage.from_user(shared.QUESTION)])
print(result["messages"])
shared.check_answer(result["messages"][-1].text)
