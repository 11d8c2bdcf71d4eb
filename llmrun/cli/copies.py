"""Which quantized models are copies in the store, and what only such a copy can be."""

from llmrun.cli.choice import Choice, CopyOptions
from llmrun.cli.source import Source, is_dense
from llmrun.errors import UnavailableError

WITHOUT_TEXT = ("auto", "none")
"""Values of ``--calibrate`` with which no text has to be read."""

STAYS = "its weights stay as they are stored"


def is_kept_in_store(choice: Choice, source: Source) -> bool:
    """Whether a model in a scheme is a copy in the store, not made anew with each load."""
    if choice.scheme is None:
        return False
    if source.is_quantized and not choice.requantized and _keeps_some(source):
        return False
    return source.binding.inexpressible is None


def _keeps_some(source: Source) -> bool:
    """Whether some weights stay quantized as they are stored, beside others that are opened."""
    plain = source.opened()
    return any(
        not is_dense(kind) and name not in plain for name, (_, _, kind) in source.weights().items()
    )


def made_while_loading(source: Source) -> str:
    """Why a model that is no copy is quantized as it is loaded, weight by weight."""
    why = source.binding.inexpressible or "some of its weights are quantized already"
    return f"the model is quantized while it is loaded, since {why}"


def refuse_unused(options: CopyOptions, why: str) -> None:
    """UnavailableError if something was asked for that only a copy in the store can be."""
    asked = [f"--calibrate {options.calibrate}"] if options.calibrate not in WITHOUT_TEXT else []
    if options.target_bpw is not None:
        asked.append(f"--target-bpw {options.target_bpw:g}")
    if asked:
        raise UnavailableError(
            f"{' and '.join(asked)} would change nothing of this model: {why}",
            "leave it out, or take the unquantized model",
        )
