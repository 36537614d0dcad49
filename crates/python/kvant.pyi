"""Run large language models on a compressed KV cache."""

from array import array
from os import PathLike
from typing import Iterator, Mapping, Optional, Sequence, Tuple, Union, final

__version__: str

# A conversation in the model's chat format ({"role": ..., "content": ...}, and "images": [bytes of files] that are shown before
# that), a text to continue in which nothing is a special token, or token numbers.
Prompt = Union[Sequence[Mapping[str, Union[str, Sequence[bytes]]]], str, Sequence[int]]

class KvantError(Exception):
    """The engine refused: one line that says what was expected and what was found."""

@final
class Model:
    """A loaded model; any threads may use it at once."""

    @staticmethod
    def open(
        path: Union[str, "PathLike[str]"],
        *,
        device: str = "auto",
        n_threads: Optional[int] = None,
        loras: "Sequence[Union[str, PathLike[str], Tuple[Union[str, PathLike[str]], float]]]" = (),
        mmproj: "Optional[Union[str, PathLike[str]]]" = None,
    ) -> "Model":
        """Loads a GGUF file. `device` is auto, cpu, cuda:N or wgpu:N; `n_threads` None is all cores. `loras` are adapters (LoRA),
        each a GGUF file or a folder as PEFT saves it, or such a path with how much of it is added; `mmproj` is the file that
        makes tokens of pictures."""
    @staticmethod
    def bundled(*, device: str = "auto", n_threads: Optional[int] = None) -> "Model":
        """Loads the small model that is built in."""
    def session(
        self,
        kv: Union[str, Tuple[str, str]] = "f16",
        *,
        kv_policy: Optional[str] = None,
        n_ctx: Optional[int] = None,
        lora_strengths: Optional[Sequence[float]] = None,
    ) -> "Session":
        """An empty session. `kv` is what the cache stores: f32 f16 bf16 q8_0 q4_0 turbo4 turbo3 turbo2 turbo3t turbo2t, or a
        pair for keys and values; `kv_policy` rules on top, as "sink:16" or "none"; `n_ctx` None is the length the model was
        trained for; `lora_strengths` says how much of each of the model's adapters is added, in the place of what it was loaded with."""
    def embed(
        self,
        texts: Sequence[str],
        *,
        pooling: Optional[str] = None,
        dimensions: Optional[int] = None,
        kv: Union[str, Tuple[str, str]] = "f16",
    ) -> "list[list[float]]":
        """A vector of length 1 for each text. `pooling` is mean or last (None: as the file says, or last); `dimensions` keeps
        the first values; `kv` is what the cache stores meanwhile."""
    def tokens(self, prompt: Prompt) -> "list[int]":
        """Token numbers of a prompt."""
    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
    @property
    def n_vocab(self) -> int:
        """Size of the vocabulary."""
    @property
    def device(self) -> str:
        """The device that the model runs on."""

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
    ) -> "Generation":
        """Reads a prompt and continues it; temperature 0 always takes the likeliest token. Tokens that the session shares with
        the beginning of the prompt are kept, others are forgotten."""
    def feed(self, prompt: Prompt) -> None:
        """Reads a prompt after what is there."""
    def logits(self) -> "array[float]":
        """The logits that follow the last token that was fed, [n_vocab]."""
    def rewind(self, n_tokens: int) -> None:
        """Forgets everything but the first tokens."""
    def fork(self) -> "Session":
        """A second session that begins with the same tokens and shares their memory."""
    @property
    def tokens(self) -> "list[int]":
        """The tokens in the cache."""
    @property
    def n_ctx(self) -> int:
        """Tokens that fit."""
    @property
    def kv(self) -> "KvUse":
        """What the cache takes right now."""

@final
class Generation(Iterator[str]):
    """The text that follows a prompt, as it becomes complete. The session must not be used for anything else meanwhile."""

    def __iter__(self) -> "Generation": ...
    def __next__(self) -> str: ...
    @property
    def finish(self) -> Optional[str]:
        """stop, length, context or cancelled, once it has ended."""
    @property
    def n_prompt(self) -> int:
        """Prompt tokens that were read; those that the session held before are not counted."""
    @property
    def n_gen(self) -> int:
        """Tokens generated so far."""
    @property
    def prompt_tps(self) -> float:
        """Prompt tokens per second; 0 when none was read."""
    @property
    def decode_tps(self) -> float:
        """Generated tokens per second; 0 when none went through the model."""

@final
class KvUse:
    """What a cache takes, measured."""

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
