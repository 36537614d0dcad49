# /// script
# dependencies = ["instructor"]
# ///
"""instructor: structured output in its default mode and by JSON schema, parallel tool calls"""

import typing

import instructor
import pydantic
import shared
from openai import OpenAI


class Stock(pydantic.BaseModel):
    """How many pieces of a part a shelf holds."""

    part: str
    shelf: int
    pieces: int


TEXT = "Shelf 7 holds 4371 pieces of part M8."
client = OpenAI(base_url=shared.API)
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
    got = instructor.from_openai(client, mode=mode).chat.completions.create(
        model=shared.MODEL, response_model=Stock, messages=[{"role": "user", "content": TEXT}], max_retries=0
    )
    print(mode, got)
    assert got.model_dump() == {"part": "M8", "shelf": 7, "pieces": 4371}, f"{mode}: {got}"

parallel = instructor.from_openai(client, mode=instructor.Mode.PARALLEL_TOOLS).chat.completions.create(
    model=shared.MODEL,
    response_model=typing.Iterable[Stock],
    messages=[
        {
            "role": "user",
            "content": TEXT + "\nShelf 9 holds 25 pieces of part M4.\nRecord both shelves, each with a call of its own.",
        }
    ],
)
got = [stock.model_dump() for stock in parallel]
want = [{"part": "M8", "shelf": 7, "pieces": 4371}, {"part": "M4", "shelf": 9, "pieces": 25}]
assert got == want, f"parallel: {got}"
