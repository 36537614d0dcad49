# /// script
# dependencies = ["autogen-agentchat", "autogen-ext[openai]"]
# ///
"""AutoGen: an assistant that reflects on its tool's result"""

import asyncio

import shared
from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

ABILITIES = {"vision": False, "function_calling": True, "json_output": True, "family": "unknown", "structured_output": True}


async def main():
    model = OpenAIChatCompletionClient(model=shared.MODEL, base_url=shared.API, api_key="none", model_info=ABILITIES)
    agent = AssistantAgent("clerk", model, tools=[shared.count_pieces], reflect_on_tool_use=True)
    result = await agent.run(task=shared.QUESTION)
    print(result.messages)
    return result.messages[-1].content


shared.check_answer(asyncio.run(main()))
