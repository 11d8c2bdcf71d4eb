"""Out of memory, said in llmrun's own words."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from llmrun.errors import DoesNotFitError


@contextmanager
def allocating(what: str) -> Iterator[None]:
    """Turn torch's failure to allocate ``what`` into DoesNotFitError; other errors pass."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        out_of_memory = isinstance(error, MemoryError | torch.cuda.OutOfMemoryError)
        if not out_of_memory and "allocate memory" not in str(error):
            raise
        raise DoesNotFitError(
            f"there is no memory left for {what}",
            "use a smaller --ctx, fewer bits (-q int4) or a smaller model, or close other programs",
        ) from error
