# /// script
# dependencies = []
# [tool.kvant]
# npm = ["ai", "@ai-sdk/openai-compatible", "zod"]
# ///
"""Vercel's AI SDK: its tool loop, with generateText and streamText"""

import json
import pathlib

import shared

PROGRAM = """
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { url, name, question, description, result } = JSON.parse(process.argv[2]);
const model = createOpenAICompatible({ name: "kvant", baseURL: url })(name);
const run = async (generate) => {
  const calls = [];
  const count_pieces = tool({
    description,
    inputSchema: z.object({ part: z.string(), shelf: z.number().int() }),
    execute: async ({ part, shelf }) => (calls.push([part, shelf]), result),
  });
  const settings = { model, prompt: question, tools: { count_pieces }, stopWhen: stepCountIs(4), maxRetries: 0 };
  return { text: await generate(settings), calls };
};
const whole = await run(async (settings) => (await generateText(settings)).text);
const streamed = await run(async (settings) => await streamText(settings).text);
console.log(JSON.stringify([whole, streamed]));
"""

program = pathlib.Path("../loop.mjs")
program.write_text(PROGRAM, encoding="utf-8")
task = {
    "url": shared.API,
    "name": shared.MODEL,
    "question": shared.QUESTION,
    "description": shared.DESCRIPTION,
    "result": shared.RESULT,
}
for run in json.loads(shared.shell("node", program, json.dumps(task)).splitlines()[-1]):
    shared.calls[:] = map(tuple, run["calls"])
    shared.check_answer(run["text"])
