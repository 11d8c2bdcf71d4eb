"""From options to a loaded model, with what there is to say about it on stderr."""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from llmrun.cli import assemble
from llmrun.cli.assemble import LoadedModel, LoadOptions
from llmrun.cli.options import HugePages, ModelOptions, PromptFlags, SamplingFlags
from llmrun.cli.progress import activity, for_session, say_meanwhile
from llmrun.cli.session import Session
from llmrun.engine.sampler import SamplingOptions
from llmrun.errors import UnavailableError
from llmrun.store.model import LocalModel
from llmrun.text.decode_input import clean_text
from llmrun.text.render_process import RenderProcess


def load(
    session: Session,
    name: str,
    options: ModelOptions,
    prompting: PromptFlags | None = None,
    process: RenderProcess | None = None,
) -> LoadedModel:
    """Load the model. UnavailableError for a scheme nobody knows, before anything is fetched.

    ``process``: to render the template, if it was made already.
    """
    check_scheme(options.quant)
    wanted = LoadOptions(
        model=name,
        quant=options.quant,
        device=options.device,
        ctx=options.ctx or None,
        kv=options.kv,
        offload=options.offload,
        threads=options.threads,
        threads_prefill=options.threads_prefill,
        threads_decode=options.threads_decode,
        huge_pages=options.hugepages is HugePages.ON,
        cpu_isa=options.cpu_isa,
        revision=options.revision,
        requantize=options.requantize,
        calibrate=options.calibrate,
        target_bpw=options.target_bpw,
        allow_partial=options.allow_partial,
        template=prompting.template if prompting else None,
        chat=prompting is not None and not prompting.raw,
    )
    with activity(session, f"loading {name} ..."):
        loaded = assemble.load(
            wanted, session.settings, for_session(session), process, partial(say_meanwhile, session)
        )
    for note in loaded.notes:
        session.say(f"note: {note}")
    if loaded.template_note and not (prompting and prompting.raw):
        session.say(f"note: {loaded.template_note}")
    if session.verbose:
        for decision in loaded.decisions:
            session.say(f"chosen: {decision}")
        session.say(f"loaded in {loaded.times.total_ms:.0f} ms ({_listed(loaded.times.parts_ms)})")
        session.say(f"side by side: {_listed(loaded.times.beside_ms)}")
        session.say(facts(loaded))
    return loaded


def _listed(parts_ms: Mapping[str, float]) -> str:
    return ", ".join(f"{part} {ms:.0f} ms" for part, ms in parts_ms.items())


def facts(loaded: LoadedModel) -> str:
    """One line: model, scheme with the bits it really takes, device, context."""
    bits = loaded.coverage.total.bits_per_weight
    parts = (
        title(loaded.local),
        f"{loaded.scheme} ({bits:.2f} bits per weight)",
        f"{loaded.backend.device} ({loaded.backend.isa or loaded.backend.name})",
        f"context {loaded.context:,} tokens",
    )
    return " · ".join(parts)


def title(local: LocalModel) -> str:
    """What a model is called where there is little room: of a path its last part."""
    is_path = local.source in ("folder", "gguf")
    return local.path.name if is_path else local.alias or local.name


def check_scheme(name: str) -> None:
    """UnavailableError, with the names there are, for an unknown scheme."""
    if name in ("auto", "none"):
        return
    from llmrun.quant.scheme import schemes

    known_names = ("auto", "none", *schemes())
    if name not in known_names:
        raise UnavailableError(
            f"There is no quantization scheme named {name!r}.",
            f"Choose one of: {', '.join(known_names)}.",
        )


def is_alias(text: str) -> bool:
    """Whether a text is exactly the short name of a model in the catalog."""
    from llmrun.store import catalog

    return text in catalog.load().entries


def is_model_path(text: str) -> bool:
    """Whether a text is the path of a GGUF file, or of a folder with a config, that is there."""
    file = text if text.endswith(".gguf") else os.path.join(text, "config.json")
    return os.path.isfile(file)  # false for whatever is no path at all


def known(name: str, revision: str | None) -> None:
    """ModelNotFoundError for a name that means no model; no network."""
    from llmrun.store import catalog
    from llmrun.store.reference import resolve

    resolve(name, catalog.load(), revision)


def stop_strings(loaded: LoadedModel, flags: SamplingFlags, *, raw: bool) -> tuple[str, ...]:
    """Those the user gave and, unless ``raw`` leaves the template out, those it needs."""
    own = () if raw else loaded.stops
    return (*own, *(clean_text(stop).text for stop in flags.stop))


def sampling_options(loaded: LoadedModel, flags: SamplingFlags) -> SamplingOptions:
    """The model's own sampling, changed by what the user gave."""
    given = {
        name: value
        for name in ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed")
        if (value := getattr(flags, name)) is not None
    }
    return replace(loaded.sampling, **given)
