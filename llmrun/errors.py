"""One exception tree; every class has one exit code (docs: README, "Exit codes").

An error says what happened, why, and what to type next. Foreign exceptions are mapped to this
tree in the file that owns the foreign library, with ``raise ... from``. A leaf: imports nothing.
"""


class LlmrunError(Exception):
    """Base of every error llmrun raises on purpose.

    ``what`` states what happened and why; ``next_step`` what the user can do about it.
    """

    exit_code = 1

    def __init__(self, what: str, next_step: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.next_step = next_step

    def __str__(self) -> str:
        return f"{self.what}\n{self.next_step}" if self.next_step else self.what


class InternalError(LlmrunError):
    """A fault of llmrun itself, a failed local write, or non-finite logits from finite weights."""

    exit_code = 1


class UsageError(LlmrunError):
    """A bad option value, a bad template or messages the model's template refuses."""

    exit_code = 2


class ModelNotFoundError(LlmrunError):
    """Unknown alias, repository, revision or file; or offline and not in the store."""

    exit_code = 3


class DownloadError(LlmrunError):
    """Network, authorization, length or hash mismatch, full disk during a pull."""

    exit_code = 4


class ModelFileError(LlmrunError):
    """A model file is damaged, incomplete or of a kind llmrun does not support."""

    exit_code = 5


class DoesNotFitError(LlmrunError):
    """The model does not fit in memory, predicted before loading or met while running."""

    exit_code = 6


class ContextError(LlmrunError):
    """The prompt does not fit the context."""

    exit_code = 7


class StructuredOutputError(LlmrunError):
    """Constrained output could not be satisfied."""

    exit_code = 8


class UnavailableError(LlmrunError):
    """A requested device, kernel, scheme or option is not available here."""

    exit_code = 9


class InterruptError(LlmrunError):
    """The user interrupted the run."""

    exit_code = 130


class ClosedPipeError(LlmrunError):
    """The reader of standard output went away."""

    exit_code = 141
