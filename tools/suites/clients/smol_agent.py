# /// script
# dependencies = ["smolagents[openai]"]
# ///
"""smolagents: an agent whose final tool call is the answer"""

import shared
import smolagents

model = smolagents.OpenAIServerModel(model_id=shared.MODEL, api_base=shared.API, api_key="none", parallel_tool_calls=False)
agent = smolagents.ToolCallingAgent(tools=[smolagents.tool(shared.count_pieces)], model=model, max_steps=4)
shared.check_answer(str(agent.run(shared.QUESTION)))
