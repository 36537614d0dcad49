# /// script
# dependencies = ["semantic-kernel"]
# ///
"""Semantic Kernel: an agent with automatic calls of a plugin's functions"""

import asyncio

import openai
import shared
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function


class Warehouse:
    @kernel_function(name="count_pieces", description=shared.DESCRIPTION)
    def count_pieces(self, part: str, shelf: int) -> str:
        return shared.count_pieces(part, shelf)


async def main():
    client = openai.AsyncOpenAI(base_url=shared.API)
    service = OpenAIChatCompletion(ai_model_id=shared.MODEL, async_client=client)
    agent = ChatCompletionAgent(service=service, name="clerk", plugins=[Warehouse()])
    return str(await agent.get_response(shared.QUESTION))


shared.check_answer(asyncio.run(main()))
