"""``llmrun`` over a fake model that needs no torch: ``python fake_program.py run "..."``.

Tokens are bytes. The model answers ``You said: <last message>.``; a message that holds ``SHOW``
gets the whole rendered prompt back, ``FAKE_REPLY`` in the environment is the answer to everything,
``FAKE_DELAY_MS`` the time of each step, ``FAKE_RENDER_MS`` that of a template, ``FAKE_CONTEXT`` the
context, ``FAKE_FAILURE`` the name of an error of llmrun.errors that loading raises. With
``FAKE_FALLBACK`` the template is the fallback, which ends at ``USER:``. Tests load this file as a
module too.
"""

import codecs
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llmrun import errors
from llmrun.cli import assemble
from llmrun.engine.sampler import SamplingOptions
from llmrun.kernels.ops import Heads, Pick, PickRequest, Span
from llmrun.model.spec import DecoderSpec, LayerSpec, NormSpec
from llmrun.quant.audit import Coverage, RoleCoverage
from llmrun.quant.roles import Role
from llmrun.store.model import FileRecord, LocalModel

END = 256
VOCAB = 257
ASSISTANT = "assistant: "
CARD_FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB of "
    "which 1.20 GiB is free. Including non-PyTorch memory, this process has 22.44 GiB in use."
)


class Backend:
    """Keeps nothing; the model puts the next id in place of logits."""

    name = "fake"
    device = "cpu"
    threads = 1
    isa = None

    def kv_layer(self, *shape: object) -> SimpleNamespace:
        return SimpleNamespace(nbytes=1024)

    def kv_copy(self, *what: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def pick(self, logits: list[int], requests: Sequence[PickRequest]) -> list[Pick]:
        return [Pick(token_id, -0.5) for token_id in logits]

    def measure_bandwidth(self) -> float:
        return 1e10

    def measure_flops(self) -> float:
        return 1e11


class Model:
    """Knows its answer by heart; each step looks how much of it was said."""

    max_tokens = 16
    weight_bytes = 1000
    weight_bytes_per_token = 1000
    linear_parameters = 1000

    def __init__(self, spec: DecoderSpec, backend: Backend) -> None:
        self.spec = spec
        self.backend = backend
        self.fed: list[int] = []
        self.delay_s = float(os.environ.get("FAKE_DELAY_MS", "0")) / 1e3

    def forward(
        self,
        token_ids: Sequence[int],
        spans: Sequence[Span],
        kv: object,
        rows: Sequence[int],
        interrupt: object = None,
        stage: int = 0,
    ) -> list[int]:
        time.sleep(self.delay_s)
        del self.fed[spans[0].position :]
        self.fed += token_ids
        prompt, _, said = bytes(i for i in self.fed if i != END).rpartition(ASSISTANT.encode())
        reply = self.reply(prompt.decode()).encode()
        return [reply[len(said)] if len(said) < len(reply) else END] * len(rows)

    def chain(self, *of: object) -> None:
        """None: each id passes through the host."""

    def reply(self, prompt: str) -> str:
        last = prompt.rpartition("user: ")[2].strip()
        if "CRASH" in last:
            raise ZeroDivisionError("a fault")
        if "MEMORY" in last:
            raise MemoryError
        if "CARD" in last:
            raise RuntimeError(CARD_FULL)
        if "SHOW" in last:
            return prompt.replace("assistant: ", "assistant= ")
        return os.environ.get("FAKE_REPLY") or f"You said: {last}."


class Tokenizer:
    """One id per byte, and an end."""

    n_ids = VOCAB
    special_ids = hidden_ids = frozenset({END})
    bos_id = None
    add_bos = False
    specials = SimpleNamespace(defuse=lambda text, own_words=False: text)

    def __init__(self) -> None:
        self.special_tokens = {"<end>": END}

    def encode_rendered(self, text: str) -> list[int]:
        return list(text.encode())

    encode_with_specials = encode_rendered

    def unencodable(self, text: str) -> frozenset[str]:
        return frozenset(text) & {"\x16"}

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def text_stream(self) -> SimpleNamespace:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return SimpleNamespace(
            push=lambda token: decoder.decode(token.encode("latin-1")),
            flush=lambda: decoder.decode(b"", final=True),
        )


class Template:
    """``role: content`` lines."""

    def render(self, messages: Sequence[Any], **options: object) -> str:
        time.sleep(float(os.environ.get("FAKE_RENDER_MS", "0")) / 1e3)
        return "".join(f"{m.role}: {m.content}\n" for m in messages) + ASSISTANT


def loaded(context: int = 4096) -> assemble.LoadedModel:
    """The fake model, ready to answer."""
    spec = DecoderSpec(
        architecture="fake",
        vocab=VOCAB,
        hidden=8,
        intermediate=8,
        heads=Heads(1, 1, 8),
        layers=(LayerSpec(rope=None),),
        norm=NormSpec(1e-5),
        activation="silu",
        attention_scale=1.0,
        max_positions=1_000_000,
        tied=True,
    )
    backend = Backend()
    parts: Any = {
        "decoder": Model(spec, backend),
        "backend": backend,
        "tokenizer": Tokenizer(),
        "template": Template(),
    }
    if os.environ.get("FAKE_FALLBACK"):
        parts |= {"template_note": "a plain form is used", "stops": ("USER:",)}
    return assemble.LoadedModel(
        local=LocalModel(
            name="fake",
            source="folder",
            origin=str(Path.home() / "models" / "fake"),
            revision="0" * 40,
            path=Path("fake"),
            files=(FileRecord("model.safetensors", 1000, "ab" * 32),),
            bytes=1000,
        ),
        scheme="int4",
        coverage=Coverage({Role.DOWN: RoleCoverage(1, 2000, 1000)}, {"int4": 1}, (), 4.0, 4.0),
        spec=spec,
        stop_ids=frozenset({END}),
        sampling=SamplingOptions(temperature=0.5, seed=None),
        context=context,
        kv_form="f16",
        times=assemble.LoadTimes({"open": 1.0, "weights": 2.0}),
        notes=("the fake model was chosen",),
        **parts,
    )


def load(
    options: assemble.LoadOptions,
    settings: object,
    progress: object,
    process: object = None,
    say: object = None,
) -> assemble.LoadedModel:
    """Stands in for ``assemble.load``."""
    if failure := os.environ.get("FAKE_FAILURE"):
        raise getattr(errors, failure)("It failed.", "Type something else.")
    if options.model == "missing":
        raise errors.ModelNotFoundError("'missing' is no known model.", "See `llmrun list`.")
    return loaded(options.ctx or int(os.environ.get("FAKE_CONTEXT", "4096")))


if __name__ == "__main__":
    from llmrun.cli.app import main

    assemble.load = load
    main(sys.argv[1:])
