"""Which hidden states are read off behind a layer, and what comes of it."""

import math

import pytest
import torch

from llmrun.cli.eval_lens import ROWS, Read, Sample, kl_behind_layer, sample
from llmrun.kernels.forms import Dense, Form
from llmrun.kernels.reference.arrays import to_host
from llmrun.kernels.reference.backend import TorchBackend
from llmrun.model.architecture import architectures
from llmrun.model.parameters import FINAL_NORM, expected
from llmrun.model.streaming import LayerStream

ARCH = architectures()["llama"]
SPEC = ARCH.spec(ARCH.tiny[0])
SEQUENCES = [[(7 * number + 3 * i) % SPEC.vocab for i in range(11)] for number in range(3)]


def tensors() -> dict[str, Form]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: Dense(to_host(torch.randn(parameter.shape, generator=generator) * 0.3))
        for name, parameter in expected(SPEC).items()
    }


def read(given: dict[str, Form], max_tokens: int = 64) -> Read:
    """Behind the first layer."""
    stream = LayerStream(SPEC, TorchBackend("cpu", 1), SEQUENCES, max_tokens=max_tokens)
    stream.embed(given)
    stream.run_layer(0, given)
    return Read(stream, stream.ending(given))


def test_chunks_of_other_lengths_are_read_at_the_same_positions() -> None:
    told: list[int] = []
    what = Sample((0, 2), range(2, 10))
    given = tensors()
    kls = kl_behind_layer(read(given), [read(given, 4)], what, SPEC.vocab, told.append)
    assert kls[0] == pytest.approx(0, abs=1e-6)
    assert sum(told) == 2 * what.rows


def test_the_logits_read_off_are_those_of_the_end() -> None:
    """The KL of two models, computed from the logits of all positions in fp64."""
    given = tensors()
    other = given | {FINAL_NORM: Dense(to_host(torch.linspace(0.2, 1.5, SPEC.hidden)))}
    reads = [read(given), read(other)]
    what = Sample((1, 2), range(3, 9))
    found = kl_behind_layer(reads[0], reads[1:], what, SPEC.vocab, lambda rows: None)
    logp = [
        torch.stack(
            [
                torch.frombuffer(bytearray(rows.logits.data), dtype=torch.float32)
                .view(rows.logits.shape)[3:9]
                .double()
                .log_softmax(-1)
                for rows in one.stream.logits(one.ending)
                if rows.sequence in what.sequences
            ]
        )
        for one in reads
    ]
    want = (logp[0].exp() * (logp[0] - logp[1])).sum(-1).mean()
    assert found == [pytest.approx(float(want), rel=1e-4)]
    assert found[0] > 0.01


def test_states_that_are_not_finite_have_no_kl() -> None:
    given = tensors()
    broken = given | {FINAL_NORM: Dense(to_host(torch.full((SPEC.hidden,), math.nan)))}
    what = sample(len(SEQUENCES), range(5, 10))
    found = kl_behind_layer(read(given), [read(broken)], what, SPEC.vocab, lambda rows: None)
    assert math.isnan(found[0])


@pytest.mark.parametrize(
    ("windows", "scored", "sequences", "positions"),
    [
        (1, range(256, 511), [0], range(495, 511)),
        (16, range(256, 511), list(range(16)), range(507, 511)),
        (3, range(4, 7), [0, 1, 2], range(4, 7)),
        (128, range(2, 3), list(range(0, 128, 2)), range(2, 3)),
    ],
)
def test_the_last_positions_of_windows_are_read(
    windows: int, scored: range, sequences: list[int], positions: range
) -> None:
    found = sample(windows, scored)
    assert (list(found.sequences), found.positions) == (sequences, positions)
    assert found.rows <= ROWS
