"""llama.cpp's side of the comparison, through its Python package; started by ``peers.py``.

    python benchmarks/peer_llamacpp.py MODEL.gguf --capacity 640 --sequences 1 --threads 2
    python benchmarks/peer_llamacpp.py MODEL.gguf --requantize Q4_0 OUT.gguf

Needs the standard library and llama_cpp alone. What is not set here is llama.cpp's default.
"""

import argparse
import ctypes
import time
from collections.abc import Sequence
from pathlib import Path

import llama_cpp  # type: ignore[import-not-found]
from work import Facts, compiler, serve

CHUNK = 512
"""Tokens of one call of llama_decode, and llama.cpp's own default for its physical batch."""


def main() -> None:
    """Serve the work, or requantize."""
    options = _options()
    silent = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_nothing)
    llama_cpp.llama_log_set(silent, None)
    llama_cpp.llama_backend_init()
    if options.requantize:
        kind, out = options.requantize
        _requantize(options.model, kind, out, options.threads)
    else:
        engine = LlamaCpp(options.model, options.capacity, options.sequences, options.threads)
        serve(engine, options.sequences)


class LlamaCpp:
    """The engine of ``work.serve``."""

    def __init__(self, path: str, capacity: int, sequences: int, threads: int) -> None:
        start = time.perf_counter()
        settings = llama_cpp.llama_model_default_params()
        model = llama_cpp.llama_model_load_from_file(path.encode(), settings)
        if not model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self._context = _context(model, capacity, sequences, threads)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(max(CHUNK, sequences), 0, 1)
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.facts: Facts = {
            "engine": "llama.cpp",
            "version": f"llama-cpp-python {llama_cpp.__version__}",
            "model": _description(model),
            "model_bytes": llama_cpp.llama_model_size(model),
            "load_s": round(time.perf_counter() - start, 3),
            "threads": threads,
            "features": _features(),
            "compiler": _compiler(),
        }

    def forget(self, sequence: int, length: int) -> None:
        """Keep the first tokens of a sequence."""
        llama_cpp.llama_memory_seq_rm(self._memory, sequence, length, -1)

    def feed(self, sequence: int, position: int, ids: Sequence[int]) -> None:
        """Append tokens, with the logits of the last."""
        for start in range(0, len(ids), CHUNK):
            part = ids[start : start + CHUNK]
            for offset, token_id in enumerate(part):
                last = start + offset == len(ids) - 1
                self._put(offset, token_id, position + start + offset, sequence, last)
            self._decode(len(part))

    def step(self, position: int, token_id: int, sequences: int) -> None:
        """Append one token to each sequence, with logits."""
        for sequence in range(sequences):
            self._put(sequence, token_id, position, sequence, True)
        self._decode(sequences)

    def _put(self, row: int, token_id: int, position: int, sequence: int, logits: bool) -> None:
        batch = self._batch
        batch.token[row] = token_id
        batch.pos[row] = position
        batch.n_seq_id[row] = 1
        batch.seq_id[row][0] = sequence
        batch.logits[row] = logits

    def _decode(self, n_tokens: int) -> None:
        self._batch.n_tokens = n_tokens
        status = llama_cpp.llama_decode(self._context, self._batch)
        if status != 0:
            raise SystemExit(f"llama_decode returned {status}")
        llama_cpp.llama_synchronize(self._context)


def _context(model: object, capacity: int, sequences: int, threads: int) -> object:
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = capacity * sequences
    settings.n_batch = settings.n_ubatch = CHUNK
    settings.n_seq_max = sequences
    settings.n_threads = settings.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, settings)
    if not context:
        raise SystemExit(f"llama.cpp cannot hold {sequences} x {capacity} tokens")
    return context


def _requantize(source: str, kind: str, out: str, threads: int) -> None:
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    settings.allow_requantize = True
    settings.nthread = threads
    pointer = ctypes.byref(settings)
    if llama_cpp.llama_model_quantize(source.encode(), out.encode(), pointer) != 0:
        raise SystemExit(f"llama.cpp cannot make {kind} of {source}")


def _description(model: object) -> str:
    text = ctypes.create_string_buffer(128)
    llama_cpp.llama_model_desc(model, text, len(text))
    return text.value.decode("utf-8", "replace")


def _features() -> str:
    """What it was built for and uses here, of a text like ``CPU : AVX2 = 1 | OPENMP = 1 |``."""
    parts = llama_cpp.llama_print_system_info().decode("ascii", "replace").split("|")
    return " ".join(part.split("=")[0].split(":")[-1].strip() for part in parts if "= 1" in part)


def _compiler() -> str | None:
    folder = Path(llama_cpp.__file__).parent / "lib"
    found = sorted(folder.glob("*ggml-cpu*"))
    return compiler(found[0]) if found else None


def _nothing(*_: object) -> None:
    """llama.cpp's log is not wanted."""


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--capacity", type=int, default=1024, help="tokens of one sequence")
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--requantize", nargs=2, metavar=("KIND", "OUT"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
