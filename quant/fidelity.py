"""How far a child's predictions are from its reference's, on the same tokens.

Both models' logits come in blocks of rows; log-softmax is taken in fp32 over the true vocabulary
(padding rows of the head are cut off), sums in fp64. A position where either model is not finite is
counted and left out of everything else. Percentiles are by nearest rank: values that occurred.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING

from llmrun.kernels.host import HostArray
from llmrun.quant.arrays import floats

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Doubles = NDArray[np.float64]

CONFIDENCE_EDGES = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)
"""Borders of the buckets of the reference's largest probability; the last includes its end."""

CONFIDENT = 0.9
"""Above this largest probability of the reference a changed top token is a serious one."""

PER_MILLE = {"p0_1": 1, "p1": 10, "p5": 50, "p10": 100, "median": 500}
PER_MILLE |= {"p90": 900, "p95": 950, "p99": 990, "p99_9": 999}
"""The percentiles of a spread, in thousandths."""

LOSSLESS_KL, LOSSLESS_FLOORS = 0.002, 3.0
GOOD_KL, VISIBLE_KL = 0.03, 0.1
"""Mean KL in nats up to which a child is called lossless-ish (or up to so many times the noise
floor), good, visible; what is worse is bad. For scale, on Llama-3-8B by llama.cpp's own tables:
Q8_0 has 0.0014, Q4_K_M 0.031, Q4_0 0.072."""

FEWEST_BEYOND = 1.0
"""Values that must lie beyond a percentile for it to be given: p99 needs 100, p99.9 1,000."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """Next-token distributions of R positions: natural logarithms F32 [R, V]; ``finite`` [R]."""

    logp: "NDArray[np.float32]"
    finite: "NDArray[np.bool_]"

    def rows(self, start: int, stop: int) -> "Predictions":
        """Those of some positions."""
        return Predictions(self.logp[start:stop], self.finite[start:stop])


def predictions(logits: HostArray, vocab: int) -> Predictions:
    """Log-softmax of logits F32 [R, V'] over the first ``vocab`` of the V' ids."""
    import numpy as np

    rows = floats(logits)[:, :vocab]
    finite: NDArray[np.bool_] = np.asarray(np.isfinite(rows).all(axis=1))
    rows = np.where(finite[:, None], rows, np.float32(0))
    shifted = rows - rows.max(axis=1, keepdims=True)
    totals = np.exp(shifted).sum(axis=1, dtype=np.float64)
    return Predictions(shifted - np.log(totals).astype(np.float32)[:, None], finite)


def divergences(reference: Predictions, child: Predictions) -> list[float]:
    """KL(reference || child) in nats at the positions where both are finite."""
    both = reference.finite & child.finite
    found: list[float] = _divergences(reference.logp[both], child.logp[both]).tolist()
    return found


def _divergences(ref: "NDArray[np.float32]", own: "NDArray[np.float32]") -> "Doubles":
    import numpy as np

    # The sum of small differences, not the difference of large sums; fp32 products suffice.
    divergences: Doubles = (np.exp(ref) * (ref - own)).sum(axis=1, dtype=np.float64)
    return divergences


@dataclass(frozen=True)
class Spread:
    """A value over all positions; a percentile is None if too few values lie beyond it.

    ``se``: standard error of the mean, positions taken as independent.
    """

    mean: float | None
    se: float | None
    min: float | None
    p0_1: float | None
    p1: float | None
    p5: float | None
    p10: float | None
    median: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    p99_9: float | None
    max: float | None


@dataclass(frozen=True)
class Share:
    """The part of ``tokens`` positions where something holds, with its standard error."""

    value: float | None
    se: float | None
    tokens: int


@dataclass(frozen=True)
class Bucket:
    """Mean KL where the reference's largest probability lies in [``low``, ``high``)."""

    low: float
    high: float
    tokens: int
    kl: float | None


@dataclass(frozen=True)
class Fidelity:
    """What was compared: ``tokens`` positions scored, ``nonfinite`` ones left out.

    ``kl``: KL(reference || child) in nats. ``delta_p``: the child's probability of the text's next
    token less the reference's. ``top1``: both hold the same token most likely; ``top1_confident``:
    of the positions where the reference gives it over 0.9. ``log_ppl_ratio``: mean of
    ln(PPL / PPL of the reference), paired by position, with its standard error; ``correlation`` of
    the two models' log-probabilities of the next token. None where nothing could be computed.
    """

    tokens: int
    nonfinite: int
    kl: Spread
    kl_by_confidence: tuple[Bucket, ...]
    delta_p: Spread
    rms_delta_p: float | None
    top1: Share
    top1_confident: Share
    ppl: float | None
    ppl_reference: float | None
    log_ppl_ratio: float | None
    log_ppl_ratio_se: float | None
    correlation: float | None

    @property
    def ppl_ratio(self) -> float | None:
        """PPL of the child over that of the reference."""
        return None if self.log_ppl_ratio is None else _exp(self.log_ppl_ratio)


class Verdict(StrEnum):
    """A mean KL in a word."""

    LOSSLESS = "lossless-ish"
    GOOD = "good"
    VISIBLE = "visible"
    BAD = "bad"


def verdict(kl: float | None, floor: float | None) -> Verdict | None:
    """Judge a mean KL beside the KL of noise; None where there is none."""
    if kl is None:
        return None
    if kl <= max(LOSSLESS_KL, LOSSLESS_FLOORS * (floor or 0.0)):
        return Verdict.LOSSLESS
    if kl <= GOOD_KL:
        return Verdict.GOOD
    return Verdict.VISIBLE if kl <= VISIBLE_KL else Verdict.BAD


class Comparison:
    """Collects positions block by block; keeps five numbers of each."""

    def __init__(self) -> None:
        self._blocks: list[Doubles] = []
        self._nonfinite = 0

    def add(self, reference: Predictions, child: Predictions, targets: Sequence[int]) -> None:
        """Compare R positions whose true next tokens are ``targets``."""
        import numpy as np

        both = reference.finite & child.finite
        self._nonfinite += int((~both).sum())
        ref, own = reference.logp[both], child.logp[both]
        row, next_ids = np.arange(len(ref)), np.asarray(targets)[both]
        columns = (
            _divergences(ref, own),
            np.exp(ref.max(axis=1, initial=-np.inf).astype(np.float64)),
            ref.argmax(axis=1) == own.argmax(axis=1),
            ref[row, next_ids],
            own[row, next_ids],
        )
        self._blocks.append(np.stack([c.astype(np.float64) for c in columns]))

    def finish(self) -> Fidelity:
        """Sum up."""
        import numpy as np

        blocks = self._blocks or [np.zeros((5, 0))]
        kl, confidence, same, ref, own = np.concatenate(blocks, axis=1)
        delta = np.exp(own) - np.exp(ref)
        log_ratio = spread(ref - own)
        return Fidelity(
            tokens=len(kl),
            nonfinite=self._nonfinite,
            kl=spread(kl),
            kl_by_confidence=_buckets(kl, confidence),
            delta_p=spread(delta),
            rms_delta_p=float(np.sqrt(np.square(delta).mean())) if len(delta) else None,
            top1=_share(same),
            top1_confident=_share(same[confidence > CONFIDENT]),
            ppl=_ppl(own),
            ppl_reference=_ppl(ref),
            log_ppl_ratio=log_ratio.mean,
            log_ppl_ratio_se=log_ratio.se,
            correlation=_correlation(ref, own),
        )


def spread(values: "Doubles") -> Spread:
    """Describe values [n]."""
    n = len(values)
    ordered = sorted(values.tolist())
    return Spread(
        mean=math.fsum(ordered) / n if n else None,
        se=float(values.std(ddof=1)) / math.sqrt(n) if n > 1 else None,
        min=ordered[0] if n else None,
        max=ordered[-1] if n else None,
        **{name: _percentile(ordered, thousandths) for name, thousandths in PER_MILLE.items()},
    )


def _percentile(ordered: list[float], thousandths: int) -> float | None:
    n = len(ordered)
    beyond = min(thousandths, 1000 - thousandths) * n / 1000
    if n == 0 or (thousandths != 500 and beyond < FEWEST_BEYOND):
        return None
    return ordered[max(-(-thousandths * n // 1000), 1) - 1]  # ceil, in integers


def _buckets(kl: "Doubles", confidence: "Doubles") -> tuple[Bucket, ...]:
    edges = CONFIDENCE_EDGES
    found = []
    for low, high in pairwise(edges):
        inside = (confidence >= low) & ((confidence < high) | (high == edges[-1]))
        n = int(inside.sum())
        found.append(Bucket(low, high, n, float(kl[inside].mean()) if n else None))
    return tuple(found)


def _share(holds: "Doubles") -> Share:
    n = len(holds)
    if n == 0:
        return Share(None, None, 0)
    p = float(holds.mean())
    return Share(p, math.sqrt(p * (1 - p) / (n - 1)) if n > 1 else None, n)


def _ppl(logp: "Doubles") -> float | None:
    return _exp(-float(logp.mean())) if len(logp) else None


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def _correlation(one: "Doubles", other: "Doubles") -> float | None:
    if len(one) < 2 or one.std() == 0 or other.std() == 0:
        return None
    x, y = one - one.mean(), other - other.mean()
    return float((x * y).sum() / math.sqrt(float((x * x).sum()) * float((y * y).sum())))
