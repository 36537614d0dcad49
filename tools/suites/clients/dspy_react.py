# /// script
# dependencies = ["dspy"]
# ///
"""DSPy: one ReAct step with a tool, with its JSON adapter"""

import dspy
import shared

model = dspy.LM(f"openai/{shared.MODEL}", api_base=shared.API, api_key="none", max_tokens=400, cache=False)
dspy.configure(lm=model, adapter=dspy.JSONAdapter())
agent = dspy.ReAct("question -> answer", tools=[shared.count_pieces], max_iters=1)
result = agent(question=shared.QUESTION)
print(result)
shared.check_answer(result.answer)
