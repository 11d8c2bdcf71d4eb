"""The record of an evaluation and its JSON form, ``llmrun.eval/1``.

The keys are an interface: scripts and comparisons read them. Probabilities and shares are parts of
1, KL is in nats, a number that could not be computed (or rests on too few values) is null.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from llmrun.cli.eval_lockstep import Measured
from llmrun.measure.environment import Environment
from llmrun.quant.fidelity import Fidelity, Spread, Verdict, verdict

SCHEMA = "llmrun.eval/1"

WORST = 10
"""Tensors that are named."""

Json = dict[str, object]


@dataclass(frozen=True)
class Scored:
    """What was read and scored. ``bos``: whether each window begins with a BOS."""

    text: str
    text_sha256: str
    token_ids_sha256: str
    context: int
    windows: int
    tokens_read: int
    bos: bool


@dataclass(frozen=True)
class Setup:
    """Where and with what it was run; peaks and seconds are those of the whole run."""

    device: str
    kernels: str
    isa: str | None
    threads: int
    kv: str
    seconds: float
    peak_host_bytes: int | None
    peak_device_bytes: int | None
    env: Environment


@dataclass(frozen=True)
class Weighed:
    """A child's weights: bits of all and of the linear layers alone, bytes in memory and of what
    is loaded (None: made while loading)."""

    bits_per_weight: float
    bits_per_linear_weight: float
    resident_bytes: int
    file_bytes: int | None


@dataclass(frozen=True)
class Subject:
    """A child and its reference by name, with revisions, and how the reference is stored.

    ``calibrate`` and ``target_bpw`` as they were asked for; None if nothing was quantized.
    ``files``: path, size and sha256 (None: nobody hashed it) of each of the model's files.
    """

    model: str
    revision: str | None
    scheme: str
    reference: str
    reference_revision: str | None
    reference_stored: str
    files: tuple[Json, ...]
    reference_files: tuple[Json, ...]
    calibrate: str | None = None
    target_bpw: float | None = None


@dataclass(frozen=True)
class EvalRecord:
    """One child compared with its reference. ``floor``: the reference with its noisy twin."""

    subject: Subject
    weighed: Weighed
    measured: Measured
    floor: Fidelity
    scored: Scored
    setup: Setup

    @property
    def fidelity(self) -> Fidelity:
        """What was found."""
        return self.measured.fidelity

    @property
    def nonfinite(self) -> int:
        """Positions that were left out."""
        return self.fidelity.nonfinite

    @property
    def verdict(self) -> Verdict | None:
        """In a word; None where nothing could be compared."""
        return verdict(self.fidelity.kl.mean, self.floor.kl.mean)

    @property
    def kl_over_floor(self) -> float | None:
        """How many times the KL of noise that means nothing."""
        kl, floor = self.fidelity.kl.mean, self.floor.kl.mean
        return None if kl is None or not floor else kl / floor


def document(records: Sequence[EvalRecord]) -> Json:
    """The JSON document: of one child its object, of several ``results``, a list of objects."""
    results = [to_json(record) for record in records]
    if len(results) == 1:
        return results[0]
    return {"schema": SCHEMA, "results": results}


def to_json(record: EvalRecord) -> Json:
    """One child's object."""
    subject, found, setup, scored = record.subject, record.fidelity, record.setup, record.scored
    result: Json = {
        "schema": SCHEMA,
        "model": subject.model,
        "revision": subject.revision,
        "reference": subject.reference,
        "reference_revision": subject.reference_revision,
        "reference_stored": subject.reference_stored,
        "scheme": subject.scheme,
        "calibrate": subject.calibrate,
        "target_bpw": subject.target_bpw,
        **_fields(record.weighed),
        "tokens_scored": found.tokens,
        "kl": _spread(found.kl),
        "kl_by_confidence": [_fields(bucket) for bucket in found.kl_by_confidence],
        "top1_agreement": found.top1.value,
        "top1_agreement_se": found.top1.se,
        "top1_agreement_confident": _fields(found.top1_confident),
        "rms_delta_p": found.rms_delta_p,
        "delta_p": _spread(found.delta_p),
        "ppl": found.ppl,
        "ppl_reference": found.ppl_reference,
        "ppl_ratio": found.ppl_ratio,
        "ln_ppl_ratio": found.log_ppl_ratio,
        "ln_ppl_ratio_se": found.log_ppl_ratio_se,
        "logprob_correlation": found.correlation,
        "noise_floor": record.floor.kl.mean,
        "noise_floor_top1_agreement": record.floor.top1.value,
        "kl_over_floor": record.kl_over_floor,
        "verdict": record.verdict,
        "nonfinite": record.nonfinite,
        "sqnr_db": list(record.measured.sqnr_db),
        "kl_by_layer": list(record.measured.kl_by_layer),
        "worst_tensors": [_fields(error) for error in record.measured.tensors[:WORST]],
        "seconds": setup.seconds,
        "peak_host_bytes": setup.peak_host_bytes,
        "peak_device_bytes": setup.peak_device_bytes,
        **_fields(scored),
        "device": setup.device,
        "kernels": setup.kernels,
        "isa": setup.isa,
        "threads": setup.threads,
        "kv": setup.kv,
        "files": list(subject.files),
        "reference_files": list(subject.reference_files),
        "env": setup.env,
    }
    cleaned = _without_nonfinite(result)
    assert isinstance(cleaned, dict)
    return cleaned


def _spread(values: Spread) -> Json:
    return _fields(values)


def _fields(data: object) -> Json:
    return {field.name: getattr(data, field.name) for field in fields(data)}  # type: ignore[arg-type]


def _without_nonfinite(value: object) -> object:
    """JSON has no infinity: a state that is the same has no noise to be divided by."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nonfinite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nonfinite(inner) for inner in value]
    return value
