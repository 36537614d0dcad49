# /// script
# dependencies = ["llama-index-core", "llama-index-llms-openai-like"]
# ///
"""LlamaIndex: a function-calling agent"""

import asyncio

import shared
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(model=shared.MODEL, api_base=shared.API, api_key="none", is_chat_model=True, is_function_calling_model=True)


async def main():
    return await FunctionAgent(tools=[shared.count_pieces], llm=model).run(shared.QUESTION)


shared.check_answer(str(asyncio.run(main())))
