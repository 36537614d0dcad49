# /// script
# dependencies = ["crewai", "litellm"]
# requires-python = ">=3.11,<3.14"
# ///
"""crewAI: a crew of one with a tool and a task"""

import crewai
import shared
from crewai.tools import tool

model = crewai.LLM(model=f"openai/{shared.MODEL}", base_url=shared.API, api_key="none")
clerk = crewai.Agent(
    role="Clerk", goal="Count pieces", backstory="You keep a warehouse.", llm=model, tools=[tool(shared.count_pieces)]
)
task = crewai.Task(description=shared.QUESTION, expected_output="The number of pieces", agent=clerk)
shared.check_answer(str(crewai.Crew(agents=[clerk], tasks=[task]).kickoff()))
