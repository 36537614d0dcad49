"""Tests of the installed wheel: `python -m unittest discover crates/python/tests`."""

import ast
import asyncio
import json
import math
import threading
import unittest
from pathlib import Path

import kvant

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
STUB = Path(__file__).parent.parent / "kvant.pyi"
CRATES = Path(__file__).parent.parent.parent


class Generating(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = kvant.Model.bundled(n_threads=2)

    def test_generation_streams_text(self):
        session = self.model.session(kv=("q8_0", "turbo3"), kv_policy="none")
        generation = session.generate(FRANCE, temperature=0)
        first = next(generation)
        self.assertEqual((generation.n_gen, generation.finish), (1, None))
        text = first + "".join(generation)
        self.assertIn("Paris", text)
        self.assertEqual((generation.finish, list(generation)), ("stop", []))
        self.assertGreater(generation.prompt_tps, 0)
        self.assertGreater(generation.decode_tps, 0)
        kv = session.kv
        self.assertEqual((kv.type_k, kv.type_v, kv.bpv_k), ("q8_0", "turbo3", 8.625))
        self.assertLess(kv.bytes, kv.bytes_f16)
        self.assertIn("q8_0/turbo3", repr(kv))

    def test_stop_texts_end_a_generation_and_are_excluded(self):
        def generation(**options):
            return self.model.session().generate(FRANCE, temperature=0, **options)

        whole = "".join(generation())
        for stop in ("aris", ["never", "aris"]):
            cut = generation(stop=stop)
            self.assertEqual(("".join(cut), cut.finish), (whole[: whole.index("aris")], "stop"))

    def test_a_logit_bias_changes_the_probability_of_a_token(self):
        first = self.model.session().generate(FRANCE, temperature=0, max_tokens=1)
        token = self.model.tokens(next(first))[0]
        biased = self.model.session().generate(FRANCE, temperature=0, max_tokens=1, logit_bias={token: -100.0})
        self.assertNotEqual(self.model.tokens(next(biased))[0], token)

    def test_texts_are_constrained_to_their_format(self):
        def text(**format):
            return "".join(self.model.session().generate(FRANCE, temperature=1.5, seed=3, max_tokens=200, format=format))

        schema = {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "size": {"type": "integer", "minimum": 10, "maximum": 99}},
            "required": ["city", "size"],
            "additionalProperties": False,
        }
        answer = json.loads(text(json_schema=schema))
        self.assertIn(answer["city"], ("Paris", "Rome"))
        self.assertTrue(10 <= answer["size"] <= 99)
        self.assertRegex(text(regex="[0-9]{3}-[a-c]"), "^[0-9]{3}-[a-c]$")
        self.assertRegex(text(grammar='start: "x" /[yz]{2}/'), "^x[yz]{2}$")
        self.assertIn(text(choice=["yes", "no"]), ("yes", "no"))
        with self.assertRaisesRegex(kvant.KvantError, "cannot be enforced|does not parse|expected"):
            text(regex="(?=a)")
        for wrong in ({}, {"xml": "a"}, {"regex": "a", "grammar": "b"}):
            with self.assertRaisesRegex(TypeError, "format: expected"):
                text(**wrong)

    def test_a_chat_has_text_and_tool_calls(self):
        answer = self.model.session().chat(FRANCE, temperature=0)
        parts = list(answer)
        self.assertEqual({kind for kind, _ in parts}, {"text"})
        self.assertEqual(answer.message, {"role": "assistant", "content": "".join(text for _, text in parts)})
        self.assertIn("Paris", answer.message["content"])
        self.assertEqual((answer.finish, answer.warnings), ("stop", []))
        self.assertGreater(answer.n_prompt, answer.n_gen)
        with self.assertRaisesRegex(TypeError, "unexpected keyword argument 'tols'"):
            self.model.session().chat(FRANCE, tols=[])
        with self.assertRaisesRegex(TypeError, "argument 'top_k'"):
            self.model.session().chat(FRANCE, top_k="a")
        with self.assertRaisesRegex(kvant.KvantError, "tool_choice: expected one of the tools"):
            self.model.session().chat(FRANCE, tool_choice={"name": "a"})
        for refused in (3, b"abc", [3.5], ["a"]):
            with self.assertRaises(TypeError):
                self.model.session().chat(refused)

    def test_a_tool_is_called_and_its_result_is_read(self):
        parameters = {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        }
        weather = {"name": "weather", "description": "The weather in a city", "parameters": parameters}
        tools = [{"type": "function", "function": weather}]
        session = self.model.session()
        messages = [{"role": "user", "content": "How is the weather in Oslo?"}]
        answer = session.chat(messages, tools=tools, tool_choice="required", temperature=0)
        self.assertEqual({kind for kind, _ in answer}, {"call", "arguments"})
        (call,) = answer.message["tool_calls"]
        self.assertEqual(call["function"]["name"], "weather")
        self.assertIn(json.loads(call["function"]["arguments"])["city"], ("Oslo", "Rome"))
        messages += [answer.message, {"role": "tool", "tool_call_id": call["id"], "content": "Rain, 4 degrees."}]
        answer = session.chat(messages, tools=tools, tool_choice="none", temperature=0, max_tokens=32)
        list(answer)
        self.assertTrue(answer.message["content"])

    def test_several_answers_share_one_prompt(self):
        options = {"max_tokens": 12, "temperature": 1.5}
        session = self.model.session()
        answers = session.answers("Once upon a time", 3, seed=5, **options)
        self.assertEqual({index for index, _, _ in answers}, {0, 1, 2})
        texts = [message["content"] for message in answers.messages]
        alone = [
            "".join(self.model.session().generate("Once upon a time", seed=5 + index, **options)) for index in range(3)
        ]
        self.assertEqual(texts, alone)
        self.assertEqual(len(set(texts)), 3)
        self.assertEqual(session.tokens, self.model.tokens("Once upon a time"))
        for n in (0, 129):
            with self.assertRaisesRegex(kvant.KvantError, "n: expected a number from 1 to 128"):
                session.answers(FRANCE, n)

    def test_a_repeated_conversation_reuses_its_prefix(self):
        session = self.model.session()
        first = session.generate(FRANCE, max_tokens=2, temperature=0)
        self.assertEqual(len(list(first)), 2)
        self.assertEqual((first.finish, first.n_prompt), ("length", len(self.model.tokens(FRANCE))))
        again = session.generate(FRANCE, max_tokens=2, temperature=0)
        self.assertEqual(again.n_prompt, 1)

    def test_sampling_follows_the_seed(self):
        def text(seed):
            return "".join(self.model.session().generate("Once upon a time", max_tokens=24, temperature=2.0, seed=seed))

        self.assertEqual(text(1), text(1))
        self.assertNotEqual(text(1), text(2))

    def test_embeddings_have_norm_1(self):
        texts = ["A cat sleeps.", "A kitten sleeps on the mat.", "Bonds fell as rates rose."]
        vectors = self.model.embed(texts, pooling="mean")
        self.assertTrue(all(abs(math.hypot(*vector) - 1) < 1e-5 for vector in vectors))
        self.assertEqual(self.model.embed(texts[1:2], pooling="mean"), vectors[1:2])
        self.assertNotEqual(self.model.embed(texts[:1], kv="turbo3"), self.model.embed(texts[:1], pooling="mean"))
        self.assertEqual(len(self.model.embed(texts[:1], dimensions=16)[0]), 16)
        for refused in ({"pooling": "cls"}, {"dimensions": 0}, {"kv": "q9"}):
            with self.assertRaises(kvant.KvantError):
                self.model.embed(texts, **refused)

    def test_text_encoders_embed_and_have_no_sessions(self):
        model = kvant.Model.open(CRATES / "engine/tests/encoders/bert", n_threads=2)
        [vector] = model.embed(["A cat sleeps."])
        self.assertLess(abs(math.hypot(*vector) - 1), 1e-5)
        self.assertNotEqual(model.embed(["A cat sleeps."], pooling="cls"), [vector])
        with self.assertRaisesRegex(kvant.KvantError, "a text encoder"):
            model.session()

    def test_a_prompt_is_text_tokens_or_messages(self):
        text = "Once upon a time"
        tokens = self.model.tokens(text)
        self.assertEqual((self.model.text(tokens), self.model.tokens(tokens)), (text, tokens))
        outputs = ["".join(self.model.session().generate(p, max_tokens=8, temperature=0)) for p in (text, tokens)]
        self.assertEqual(outputs[0], outputs[1])
        with self.assertRaises(KeyError):
            self.model.tokens([{"role": "user"}])
        for no_prompt in (3, b"abc", bytearray(b"abc")):
            with self.assertRaises(TypeError):
                self.model.tokens(no_prompt)

    def test_async_iterators_leave_the_event_loop_free(self):
        async def gather():
            turns = 0

            async def tick():
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            ticking = asyncio.create_task(tick())
            session = self.model.session()
            text = "".join([piece async for piece in session.generate(FRANCE, temperature=0)])
            parts = [part async for part in session.chat(FRANCE, temperature=0)]
            indexes = [index async for index, _, _ in session.answers(FRANCE, 2, temperature=0)]
            ended = session.generate(FRANCE)
            session.feed([1])
            with self.assertRaisesRegex(kvant.KvantError, "used for something else"):
                await ended.__anext__()
            ticking.cancel()
            return text, parts, indexes, turns

        text, parts, indexes, turns = asyncio.run(gather())
        self.assertEqual(text, "".join(self.model.session().generate(FRANCE, temperature=0)))
        self.assertEqual("".join(part for kind, part in parts if kind == "text"), text)
        self.assertEqual(set(indexes), {0, 1})
        self.assertGreater(turns, 10)

    def test_another_use_of_the_session_ends_a_generation(self):
        session = self.model.session()
        generation = session.generate(FRANCE, temperature=0)
        next(generation)
        session.feed([1])
        with self.assertRaisesRegex(kvant.KvantError, "used for something else"):
            next(generation)


class Sessions(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = kvant.Model.bundled(n_threads=1)

    def test_logits_are_a_buffer_of_the_vocabulary(self):
        session = self.model.session("turbo3")
        with self.assertRaisesRegex(kvant.KvantError, "feed a token"):
            session.logits()
        session.feed([1, 2, 3])
        logits = session.logits()
        self.assertEqual((len(logits), memoryview(logits).format), (self.model.n_vocab, "f"))
        self.assertTrue(all(map(math.isfinite, logits)))

    def test_sessions_fork_and_rewind(self):
        session = self.model.session(n_ctx=64)
        session.feed([1, 2, 3])
        fork = session.fork()
        session.rewind(1)
        self.assertEqual((session.tokens, fork.tokens, session.n_ctx), ([1], [1, 2, 3], 64))
        session.feed([2, 3])
        logits = session.logits()
        fork.rewind(2)
        fork.feed([3])
        self.assertEqual(logits, fork.logits())

    def test_sessions_have_their_own_lora_scales(self):
        fixture, adapter = (CRATES / f"model/tests/fixtures/{name}llama-h64-g8.gguf" for name in ("", "adapters/"))
        folder = CRATES / "engine/tests/adapters/llama-h64-g8"

        def logits(model, **options):
            session = model.session("f32", n_ctx=64, **options)
            session.feed([1, 2, 3])
            return list(session.logits())

        plain = kvant.Model.open(fixture, n_threads=1)
        whole, half = (kvant.Model.open(fixture, n_threads=1, loras=[lora]) for lora in (adapter, (folder, 0.5)))
        self.assertEqual(logits(whole, lora_strengths=[0]), logits(plain))
        self.assertNotEqual(logits(whole), logits(plain))
        self.assertEqual(logits(half, lora_strengths=[1]), logits(whole))
        self.assertEqual(logits(whole, lora_strengths=[0.5]), logits(half))
        with self.assertRaisesRegex(kvant.KvantError, "a number for each of 1 adapters"):
            whole.session(lora_strengths=[1, 2])

    def test_a_vision_model_encodes_images(self):
        folder = CRATES / "vision/tests"
        model = folder / "models/smolvlm/text.gguf"
        vision_model = kvant.Model.open(model, n_threads=1, mmproj=model.with_name("mmproj.gguf"))
        wide, tall = ((folder / f"images/{name}.png").read_bytes() for name in ("wide", "tall"))

        def tokens(images, of=vision_model):
            return of.tokens([{"role": "user", "content": "What?", "images": images}])

        self.assertGreater(len(tokens([wide])), len(tokens([])) + 28)
        self.assertEqual(tokens([wide]), tokens([wide]))
        self.assertNotEqual(tokens([wide]), tokens([tall]))
        self.assertGreater(max(tokens([wide])), vision_model.n_vocab)
        self.assertTrue(list(vision_model.session().generate(tokens([wide, tall]), max_tokens=2)))
        with self.assertRaisesRegex(kvant.KvantError, "a model with a vision encoder"):
            tokens([wide], self.model)
        with self.assertRaisesRegex(kvant.KvantError, "not a readable image"):
            tokens([b"text"])
        with self.assertRaisesRegex(TypeError, "images of a message"):
            tokens("a.png")

    def test_errors_are_the_engines_lines(self):
        refused = self.assertRaisesRegex
        with refused(kvant.KvantError, "absent.gguf"):
            kvant.Model.open(Path("absent.gguf"))
        with refused(kvant.KvantError, "toaster"):
            kvant.Model.bundled(device="toaster")
        with refused(kvant.KvantError, "turbo3"):
            self.model.session("turbo9")
        with refused(kvant.KvantError, "the context holds 64"):
            self.model.session(n_ctx=64).feed([1] * 65)
        with refused(kvant.KvantError, "temperature"):
            list(self.model.session().generate([1], temperature=-1))

    def test_other_threads_run_during_prefill(self):
        session = self.model.session()
        reading = threading.Thread(target=session.feed, args=([1] * 2000,))
        reading.start()
        n_turns = 0
        while reading.is_alive():
            n_turns += 1
        reading.join()
        self.assertEqual(len(session.tokens), 2000)
        # If the model held the interpreter, this thread would run once or twice.
        self.assertGreater(n_turns, 100)


class Stub(unittest.TestCase):
    def test_the_stub_matches_the_module(self):
        named = {}
        for node in ast.parse(STUB.read_text()).body:
            if isinstance(node, ast.ClassDef):
                named[node.name] = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
        for name, members in named.items():
            if name == "KvantError":
                continue
            kind = getattr(kvant, name)
            public = {m for m in vars(kind) if not m.startswith("_")}
            self.assertEqual({m for m in members if not m.startswith("_")}, public, name)
        self.assertEqual({n for n in vars(kvant) if n[0].isupper()}, set(named))


if __name__ == "__main__":
    unittest.main()
