# /// script
# dependencies = ["strands-agents[openai]"]
# ///
"""Strands: an agent with a tool, streamed"""

import shared
import strands
from strands.models.openai import OpenAIModel

model = OpenAIModel(client_args={"base_url": shared.API, "api_key": "none"}, model_id=shared.MODEL)
shared.check_answer(str(strands.Agent(model=model, tools=[strands.tool(shared.count_pieces)])(shared.QUESTION)))
