# /// script
# dependencies = ["ag2[openai]<1"]
# ///
"""AG2: two agents, one requests the tool and one runs it"""

import autogen
import shared

settings = {"config_list": [{"model": shared.MODEL, "base_url": shared.API, "api_key": "none", "price": [0, 0]}]}
clerk = autogen.AssistantAgent("clerk", system_message="You are a helpful assistant.", llm_config=settings)
user = autogen.UserProxyAgent("user", human_input_mode="NEVER", code_execution_config=False)
autogen.register_function(shared.count_pieces, caller=clerk, executor=user, description=shared.DESCRIPTION)
chat = user.initiate_chat(clerk, message=shared.QUESTION, max_turns=2)
shared.check_answer(chat.chat_history[-1]["content"])
