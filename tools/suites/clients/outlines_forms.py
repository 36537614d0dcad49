# /// script
# dependencies = ["outlines[openai]"]
# ///
"""Outlines through vLLM's fields: structured output by type, choice, regular expression, grammar"""

import json
import typing

import openai
import outlines
import pydantic
import shared


class Stock(pydantic.BaseModel):
    part: str
    pieces: int


model = outlines.from_vllm(openai.OpenAI(base_url=shared.API), shared.MODEL)
got = json.loads(model("Part M8: 4371 pieces. Answer as JSON.", Stock, max_tokens=60))
assert got == {"part": "M8", "pieces": 4371}, got
got = model("Is M8 a screw or a planet?", typing.Literal["screw", "planet"], max_tokens=20)
assert got == "screw", got
got = model("The first man walked on the Moon in 1969. In which year was that?", outlines.regex(r"[0-9]{4}"), max_tokens=20)
assert got == "1969", got
got = model("What is 12 plus 7? Answer with the sum and its result.", outlines.cfg('root ::= "12 + 7 = " [0-9]+'), max_tokens=20)
assert got == "12 + 7 = 19", got
