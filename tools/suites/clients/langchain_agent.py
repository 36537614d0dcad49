# /// script
# dependencies = ["langchain", "langchain-openai"]
# ///
"""LangChain's agent: streams its steps, calls a tool, uses its result in the answer"""

import shared
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model=shared.MODEL, base_url=shared.API)
agent = create_agent(model, [shared.count_pieces])
for step in agent.stream({"messages": [("user", shared.QUESTION)]}, stream_mode="values"):
    last = step["messages"][-1]
    print(repr(last))
shared.check_answer(last.content)
