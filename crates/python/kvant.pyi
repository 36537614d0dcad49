"""Runs large language models on a compressed KV cache."""

from array import array
from os import PathLike
from typing import Any, AsyncIterator, Iterator, Mapping, Optional, Sequence, Tuple, Union, final

__version__: str

# A conversation in the model's chat format ({"role": ..., "content": ...}, and "images": [bytes of
# files] before the content), a text to continue without special tokens, or token ids.
Prompt = Union[Sequence[Mapping[str, Union[str, Sequence[bytes]]]], str, Sequence[int]]

class KvantError(Exception):
    """An error of the engine: one line with the expected and the actual value."""

@final
class Model:
    """A loaded model; any number of threads may use it concurrently."""

    @staticmethod
    def open(
        path: Union[str, "PathLike[str]"],
        *,
        device: str = "auto",
        n_threads: Optional[int] = None,
        loras: "Sequence[Union[str, PathLike[str], Tuple[Union[str, PathLike[str]], float]]]" = (),
        mmproj: "Optional[Union[str, PathLike[str]]]" = None,
    ) -> "Model":
        """Loads a GGUF file. `device` is auto, cpu, cuda:N or wgpu:N, or several, which share the layers,
        as in cuda:0,cuda:1; `n_threads` None is all cores.
        `loras` are LoRA adapters, each the path of a GGUF file or of a PEFT folder, or such a path
        with a LoRA scale; `mmproj` is the file of the vision encoder."""
    @staticmethod
    def bundled(*, device: str = "auto", n_threads: Optional[int] = None) -> "Model":
        """Loads the built-in small model."""
    def session(
        self,
        kv: Union[str, Tuple[str, str]] = "f16",
        *,
        kv_policy: Optional[str] = None,
        n_ctx: Optional[int] = None,
        lora_strengths: Optional[Sequence[float]] = None,
    ) -> "Session":
        """Creates an empty session. `kv` is the KV-cache type: f32 f16 bf16 q8_0 q4_0 turbo4 turbo3
        turbo2 turbo3t turbo2t, or a pair for keys and values; `kv_policy` sets KV policies, such as
        "sink:16" or "none"; `n_ctx` None is the model's training length; `lora_strengths` are the
        scales of the model's LoRA adapters in place of those of loading."""
    def embed(
        self,
        texts: Sequence[str],
        *,
        pooling: Optional[str] = None,
        dimensions: Optional[int] = None,
        kv: Union[str, Tuple[str, str]] = "f16",
    ) -> "list[list[float]]":
        """Returns an embedding with L2 norm 1 for each text. `pooling` is mean, last or, in a text
        encoder, cls (None: that of the file, or last, in a text encoder mean); `dimensions` keeps the first values; `kv` is the KV-cache type."""
    def tokens(self, prompt: Prompt) -> "list[int]":
        """Returns the token ids of a prompt."""
    def text(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens."""
    @property
    def n_vocab(self) -> int:
        """The vocabulary size."""
    @property
    def device(self) -> str:
        """The name of the model's device."""

@final
class Session:
    """A conversation: tokens and their KV cache."""

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: Optional[int] = None,
        temperature: float = 0.8,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        repeat_penalty: float = 1.0,
        repeat_last_n: int = 64,
        seed: int = 0,
        ignore_eos: bool = False,
        stop: Union[str, Sequence[str], None] = None,
        logit_bias: Optional[Mapping[int, float]] = None,
        format: Optional[Mapping[str, Any]] = None,
    ) -> "Generation":
        """Feeds a prompt and generates its continuation; temperature 0 is greedy sampling. The common
        prefix of the context and the prompt is reused, and the rest is dropped. `stop` texts end it
        and are excluded; `logit_bias` is added to the logits of tokens; `format` constrains the text
        and is {"json_schema": schema}, {"regex": pattern}, {"grammar": Lark} or {"choice": texts}."""
    def chat(
        self,
        prompt: "Union[Sequence[Mapping[str, Any]], str, Sequence[int]]",
        *,
        tools: Optional[Sequence[Mapping[str, Any]]] = None,
        tool_choice: Union[str, Mapping[str, Any]] = "auto",
        parallel_tool_calls: Optional[bool] = None,
        enable_thinking: Optional[bool] = None,
        reasoning_effort: Optional[str] = None,
        reasoning_budget: Optional[int] = None,
        **generate: Any,
    ) -> "Answer":
        """Feeds a conversation and generates its next message, as text, reasoning and tool calls.
        Messages may have `tool_calls` and `tool_call_id`, and `tools` are described, as in OpenAI's
        API; `tool_choice` is none, auto, required or {"name": ...}. `reasoning_budget` is the maximum
        of reasoning tokens, `reasoning_effort` and `enable_thinking` are for templates that read
        them. `generate` are the keyword arguments of `generate`."""
    def answers(
        self,
        prompt: "Union[Sequence[Mapping[str, Any]], str, Sequence[int]]",
        n: int,
        *,
        tools: Optional[Sequence[Mapping[str, Any]]] = None,
        tool_choice: Union[str, Mapping[str, Any]] = "auto",
        parallel_tool_calls: Optional[bool] = None,
        enable_thinking: Optional[bool] = None,
        reasoning_effort: Optional[str] = None,
        reasoning_budget: Optional[int] = None,
        **generate: Any,
    ) -> "Answers":
        """Generates `n` answers at once, with the seeds `seed`, `seed` + 1, ... The prompt is fed
        once, and each answer forks the session, which then holds the prompt."""
    def feed(self, prompt: Prompt) -> None:
        """Appends a prompt to the context."""
    def logits(self) -> "array[float]":
        """Returns the logits that follow the last token fed, [n_vocab]."""
    def rewind(self, n_tokens: int) -> None:
        """Truncates the context to its first tokens."""
    def fork(self) -> "Session":
        """Creates a second session with the same tokens; all memory is copy-on-write."""
    @property
    def tokens(self) -> "list[int]":
        """The tokens in the cache."""
    @property
    def n_ctx(self) -> int:
        """The context length in tokens."""
    @property
    def kv(self) -> "KvUse":
        """The present size of the cache."""

@final
class Generation(Iterator[str], AsyncIterator[str]):
    """Iterator over the text that follows a prompt, for `for` and `async for`. Another use of the
    session ends it."""

    def __iter__(self) -> "Generation": ...
    def __next__(self) -> str: ...
    def __aiter__(self) -> "Generation": ...
    async def __anext__(self) -> str: ...
    @property
    def finish(self) -> Optional[str]:
        """stop, length, context or cancelled, after the end."""
    @property
    def n_prompt(self) -> int:
        """Prompt tokens processed, without cached tokens."""
    @property
    def n_gen(self) -> int:
        """Tokens generated so far."""
    @property
    def prompt_tps(self) -> float:
        """Prefill speed in tok/s; 0 when no prompt token was processed."""
    @property
    def decode_tps(self) -> float:
        """Decode speed in tok/s; 0 when no token was decoded."""

@final
class Answer(Iterator[Tuple[str, str]], AsyncIterator[Tuple[str, str]]):
    """Iterator over the parts of an answer, each a kind and a text: ("text", content),
    ("reasoning", reasoning), ("call", name of a tool) and ("arguments", more of the last call's
    arguments, as JSON); for `for` and `async for`. Another use of the session ends it."""

    def __iter__(self) -> "Answer": ...
    def __next__(self) -> Tuple[str, str]: ...
    def __aiter__(self) -> "Answer": ...
    async def __anext__(self) -> Tuple[str, str]: ...
    @property
    def message(self) -> "dict[str, Any]":
        """The message so far, for the next turn of the conversation: `content`, and where present
        `reasoning_content` and `tool_calls`."""
    @property
    def warnings(self) -> "list[str]":
        """Warnings about schemas of tools that are enforced in part."""
    @property
    def finish(self) -> Optional[str]:
        """stop, length, context or cancelled, after the end."""
    @property
    def n_prompt(self) -> int:
        """Prompt tokens processed, without cached tokens."""
    @property
    def n_gen(self) -> int:
        """Tokens generated so far."""

@final
class Answers(Iterator[Tuple[int, str, str]], AsyncIterator[Tuple[int, str, str]]):
    """Iterator over the parts of several answers, each the index of its answer, a kind and a text;
    for `for` and `async for`."""

    def __iter__(self) -> "Answers": ...
    def __next__(self) -> Tuple[int, str, str]: ...
    def __aiter__(self) -> "Answers": ...
    async def __anext__(self) -> Tuple[int, str, str]: ...
    @property
    def messages(self) -> "list[dict[str, Any]]":
        """The messages so far, one for each answer."""

@final
class KvUse:
    """Measured size of a KV cache."""

    @property
    def tokens(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def bytes_f16(self) -> int: ...
    @property
    def type_k(self) -> str: ...
    @property
    def type_v(self) -> str: ...
    @property
    def bpv_k(self) -> float: ...
    @property
    def bpv_v(self) -> float: ...
    @property
    def notes(self) -> "list[str]": ...
