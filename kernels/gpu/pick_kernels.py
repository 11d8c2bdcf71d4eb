"""Kernels that choose one id from a row of logits, as ``kernels/reference/sampling.py`` defines it.

``scan`` looks at every id once, in blocks: the largest scores, the winners of the race that draws,
sums of exponentials. ``choose`` takes one row to its end. Where filters are on, ``narrow`` and
``gather`` run between them and leave few candidates, in order of their ids.

Top-k and top-p need no sort: the k-th score is found by bisection, and for top-p the race is run
again among those ahead of its winner until the winner is within the nucleus, which is the same
choice, for the nucleus is what is ahead of some place. Scores, noise and sums are fp64, as in the
reference, so that a seed gives the same choice.
"""

import triton
import triton.language as tl

BLOCK = 1024
"""Ids of a program of ``scan``."""

NUMBERS = 8
"""Parameters of a row, 64 bits each: seed, draw, top_k and vocab are integers (vocab 0: the row is
not in use), then temperature, top_p, min_p and repeat_penalty."""

_BLOCK = tl.constexpr(BLOCK)
_NUMBERS = tl.constexpr(NUMBERS)
_CHUNK = tl.constexpr(2048)  # candidates looked at together
_HALVINGS = tl.constexpr(12)
_MASS_SLACK = tl.constexpr(1e-3)  # rounding of a bound; too low a one costs time only
_NOBODY = tl.constexpr(0x7FFFFFFF)  # behind every id


@triton.jit
def scan(
    logits: tl.tensor,
    numbers: tl.tensor,
    values: tl.tensor,
    seen: tl.tensor,
    best: tl.tensor,
    best_ids: tl.tensor,
    sums: tl.tensor,
    V: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Per row and block: ``best`` fp64 [3]: largest scaled score, best of the race, sum of
    exponentials of scaled scores against the largest; ``best_ids`` int32 [3]: whose they are, and
    whether a logit is not finite; ``sums`` fp32 [2]: largest logit, sum of exponentials."""
    block, row = tl.program_id(0), tl.program_id(1)
    numbers += row * _NUMBERS
    values += row * _NUMBERS
    vocab = tl.load(numbers + 3).to(tl.int32)
    if vocab == 0:
        return
    logits += row * V
    seen += row * V
    ids = block * _BLOCK + tl.arange(0, _BLOCK)
    inside = ids < vocab
    raw = tl.load(logits + ids, mask=inside, other=0.0)
    finite = tl.abs(raw) < float("inf")
    bad = tl.max((~finite).to(tl.int32), 0)
    raw = tl.where(finite, raw, 0.0)
    temperature = tl.load(values + 4)
    scaled = _scaled(raw, seen, ids, inside, temperature, tl.load(values + 7))
    top = tl.max(scaled, 0)
    top_id = tl.min(tl.where(scaled == top, ids, _NOBODY), 0)
    race, race_id, mass = top, top_id, top
    if temperature > 0.0:
        run = _raced(scaled, tl.load(numbers), tl.load(numbers + 1), ids)
        race = tl.max(run, 0)
        race_id = tl.min(tl.where(run == race, ids, _NOBODY), 0)
        if tl.load(values + 5) < 1.0:
            mass = tl.sum(tl.exp(scaled - top), 0)
    raw = tl.where(inside, raw, float("-inf"))
    largest = tl.max(raw, 0)
    # A block of padding has no largest: nothing of it may count, and no NaN come of it.
    total = tl.sum(tl.where(inside, tl.exp(raw - largest), 0.0), 0)
    place = row * 3 * BLOCKS + block
    tl.store(best + place, top)
    tl.store(best + place + BLOCKS, race)
    tl.store(best + place + 2 * BLOCKS, mass)
    tl.store(best_ids + place, top_id)
    tl.store(best_ids + place + BLOCKS, race_id)
    tl.store(best_ids + place + 2 * BLOCKS, bad)
    tl.store(sums + row * 2 * BLOCKS + block, largest)
    tl.store(sums + (row * 2 + 1) * BLOCKS + block, total)


@triton.jit
def narrow(
    logits: tl.tensor,
    numbers: tl.tensor,
    values: tl.tensor,
    seen: tl.tensor,
    best: tl.tensor,
    bounds: tl.tensor,
    counts: tl.tensor,
    V: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Per row, ``bounds`` fp64: a scaled score that every id to choose from reaches. Per row and
    block, ``counts`` int32: how many ids reach it."""
    block, row = tl.program_id(0), tl.program_id(1)
    numbers += row * _NUMBERS
    values += row * _NUMBERS
    vocab = tl.load(numbers + 3).to(tl.int32)
    if vocab == 0:
        return
    best += row * 3 * BLOCKS
    blocks = tl.arange(0, WIDTH)
    used = blocks * _BLOCK < vocab
    tops = tl.load(best + blocks, mask=used, other=float("-inf"))
    top = tl.max(tops, 0)
    mass = _mass(best, tops, top, blocks, used, BLOCKS)
    top_k, top_p, min_p = tl.load(numbers + 2), tl.load(values + 5), tl.load(values + 6)
    bound = _bound(tops, top, mass, top_k, top_p, min_p, vocab)
    count = tl.full((), 0, tl.int32)
    if tl.load(best + block) >= bound:
        here = block * _BLOCK + tl.arange(0, _BLOCK)
        scores = _scores_at(logits + row * V, seen + row * V, values, here, vocab)
        count += tl.sum(((scores >= bound) & (here < vocab)).to(tl.int32), 0)
    tl.store(counts + row * BLOCKS + block, count)
    if block == 0:
        tl.store(bounds + row, bound)


@triton.jit
def gather(
    logits: tl.tensor,
    numbers: tl.tensor,
    values: tl.tensor,
    seen: tl.tensor,
    bounds: tl.tensor,
    counts: tl.tensor,
    scaled: tl.tensor,
    ids: tl.tensor,
    V: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Candidates of each row, those that reach its bound, in order of ids: ``ids`` int32 [V] and
    their ``scaled`` scores fp64 [V]."""
    block, row = tl.program_id(0), tl.program_id(1)
    numbers += row * _NUMBERS
    values += row * _NUMBERS
    vocab = tl.load(numbers + 3).to(tl.int32)
    if vocab == 0:
        return
    counts += row * BLOCKS
    if tl.load(counts + block) == 0:
        return
    blocks = tl.arange(0, WIDTH)
    before = tl.sum(tl.load(counts + blocks, mask=blocks < block, other=0), 0)
    here = block * _BLOCK + tl.arange(0, _BLOCK)
    scores = _scores_at(logits + row * V, seen + row * V, values, here, vocab)
    kept = (scores >= tl.load(bounds + row)) & (here < vocab)
    places = row * V + before + tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.store(scaled + places, scores, mask=kept)
    tl.store(ids + places, here, mask=kept)


@triton.jit
def choose(
    logits: tl.tensor,
    numbers: tl.tensor,
    values: tl.tensor,
    seen: tl.tensor,
    best: tl.tensor,
    best_ids: tl.tensor,
    sums: tl.tensor,
    bounds: tl.tensor,
    counts: tl.tensor,
    scaled: tl.tensor,
    ids: tl.tensor,
    result: tl.tensor,
    fed_ids: tl.tensor,
    fed_positions: tl.tensor,
    V: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    FILTERS: tl.constexpr,
    FEED: tl.constexpr,
) -> None:
    """``result`` fp64 [2] of each row: the id chosen, -1 if a logit is not finite, and its logprob.

    FILTERS: of some row; ``narrow`` and ``gather`` were run. FEED: the id goes to ``fed_ids`` and
    the row moves on: position and draw count up, the id is marked as seen.
    """
    row = tl.program_id(0)
    numbers += row * _NUMBERS
    values += row * _NUMBERS
    vocab = tl.load(numbers + 3).to(tl.int32)
    if vocab == 0:
        return
    logits += row * V
    seen += row * V
    best += row * 3 * BLOCKS
    best_ids += row * 3 * BLOCKS
    sums += row * 2 * BLOCKS
    blocks = tl.arange(0, WIDTH)
    used = blocks * _BLOCK < vocab
    tops = tl.load(best + blocks, mask=used, other=float("-inf"))
    top = tl.max(tops, 0)
    top_id = _id_of(tops == top, best_ids, blocks, used)
    bad = tl.max(tl.load(best_ids + 2 * BLOCKS + blocks, mask=used, other=0), 0)
    chosen = top_id
    temperature = tl.load(values + 4)
    if temperature > 0.0:
        races = tl.load(best + BLOCKS + blocks, mask=used, other=float("-inf"))
        chosen = _id_of(races == tl.max(races, 0), best_ids + BLOCKS, blocks, used)
        if FILTERS:
            top_k, top_p, min_p = tl.load(numbers + 2), tl.load(values + 5), tl.load(values + 6)
            if (top_k > 0) | (top_p < 1.0) | (min_p > 0.0):
                scaled += row * V
                ids += row * V
                n = tl.sum(tl.load(counts + row * BLOCKS + blocks, mask=used, other=0), 0)
                cut, cut_id = tl.load(bounds + row), tl.full((), _NOBODY, tl.int32)
                if (top_k > 0) & (top_k < n):
                    cut, cut_id = _cut(scaled, ids, n, cut, top, top_k.to(tl.int32))
                if top_k > 0:
                    mass = _mass_ahead(scaled, ids, n, cut, cut_id, top)
                else:
                    mass = _mass(best, tops, top, blocks, used, BLOCKS)
                chosen = _drawn(
                    scaled, ids, n, cut, cut_id, top, top_id, mass, top_k, top_p, min_p,
                    tl.load(numbers), tl.load(numbers + 1),
                )  # fmt: skip
    largest = tl.load(sums + blocks, mask=used, other=float("-inf"))
    most = tl.max(largest, 0)
    totals = tl.load(sums + BLOCKS + blocks, mask=used, other=0.0)
    total = tl.sum(totals.to(tl.float64) * tl.exp((largest - most).to(tl.float64)), 0)
    logit = tl.load(logits + chosen)
    logprob = (logit.to(tl.float64) - most.to(tl.float64)) - tl.log(total)
    tl.store(result + row * 2, tl.where(bad != 0, -1, chosen).to(tl.float64))
    tl.store(result + row * 2 + 1, logprob)
    if FEED:
        tl.debug_barrier()  # all of the program has read what changes now
        tl.store(fed_ids + row, chosen)
        tl.store(fed_positions + row, tl.load(fed_positions + row) + 1)
        tl.store(numbers + 1, tl.load(numbers + 1) + 1)
        tl.store(seen + chosen, 1)


@triton.jit
def _scaled(
    raw: tl.tensor,
    seen: tl.tensor,
    ids: tl.tensor,
    inside: tl.tensor,
    temperature: tl.tensor,
    penalty: tl.tensor,
) -> tl.tensor:
    """Scores over temperature (over 1 where it is 0), fp64; -inf outside the vocabulary."""
    scores = raw.to(tl.float64)
    if penalty != 1.0:
        marked = tl.load(seen + ids, mask=inside, other=0) != 0
        changed = tl.where(scores > 0, scores / penalty, scores * penalty)
        scores = tl.where(marked, changed, scores)
    scores = scores / tl.where(temperature > 0.0, temperature, 1.0)
    return tl.where(inside, scores, float("-inf"))


@triton.jit
def _scores_at(
    logits: tl.tensor, seen: tl.tensor, values: tl.tensor, ids: tl.tensor, vocab: tl.tensor
) -> tl.tensor:
    """Scaled scores of some ids of a row."""
    raw = tl.load(logits + ids, mask=ids < vocab, other=0.0)
    raw = tl.where(tl.abs(raw) < float("inf"), raw, 0.0)
    return _scaled(raw, seen, ids, ids < vocab, tl.load(values + 4), tl.load(values + 7))


@triton.jit
def _mass(
    best: tl.tensor, tops: tl.tensor, top: tl.tensor, blocks: tl.tensor, used: tl.tensor,
    BLOCKS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Sum of exponentials of all scaled scores against the largest."""
    masses = tl.load(best + 2 * BLOCKS + blocks, mask=used, other=0.0)
    return tl.sum(masses * tl.exp(tops - top), 0)


@triton.jit
def _raced(scaled: tl.tensor, seed: tl.tensor, draw: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """Scaled scores and Gumbel noise: the largest sum draws from their softmax."""
    counter = ids.to(tl.uint32)
    low = (draw & 0xFFFFFFFF).to(tl.uint32) + counter * 0
    high = ((draw >> 32) & 0xFFFFFFFF).to(tl.uint32) + counter * 0
    word, _, _, _ = tl.philox(seed, low, high, counter, counter * 0)
    uniform = (word.to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
    return scaled - tl.log(-tl.log(uniform))


@triton.jit
def _id_of(
    winners: tl.tensor, best_ids: tl.tensor, blocks: tl.tensor, used: tl.tensor
) -> tl.tensor:
    """The lowest id among blocks that have the largest value."""
    ids = tl.load(best_ids + blocks, mask=used, other=_NOBODY)
    return tl.min(tl.where(winners & used, ids, _NOBODY), 0)


@triton.jit
def _bound(
    tops: tl.tensor,
    top: tl.tensor,
    mass: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    vocab: tl.tensor,
) -> tl.tensor:
    """A scaled score that every id to choose from reaches: few others do."""
    bound = tl.full((), float("-inf"), tl.float64)
    if top_k > 0:
        held = tops > float("-inf")
        if tl.sum(held.to(tl.int32), 0) >= top_k:
            # A score that so many blocks reach; to come near the highest such is enough.
            bound = tl.min(tl.where(held, tops, top), 0)
            above = top
            for _ in range(_HALVINGS):
                middle = bound + (above - bound) * 0.5
                if tl.sum((tops >= middle).to(tl.int32), 0) >= top_k:
                    bound = middle
                else:
                    above = middle
    else:
        if top_p < 1.0:
            # Less likely ids than this, all together, are no more than what top-p leaves out.
            least = tl.maximum((1.0 - top_p) * mass / vocab, 1e-300)
            bound = top + tl.log(least) - _MASS_SLACK
        if min_p > 0.0:
            floor = top + tl.log(min_p)
            if top_p < 1.0:
                floor -= _MASS_SLACK  # probabilities are compared there, not their logarithms
            bound = tl.maximum(bound, floor)
    return bound


@triton.jit
def _cut(
    scaled: tl.tensor, ids: tl.tensor, n: tl.tensor, low: tl.tensor, top: tl.tensor, k: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Score and id of the k-th candidate: by score, then by lowest id."""
    least, most = _key(low), _key(top)
    while least < most:
        middle = (least | most) - ((least ^ most) >> 1)
        count, lowest = _reaching(scaled, n, _of_key(middle))
        if count == k:  # seldom with ties; else long before the keys meet
            least = _key(lowest)
            most = least
        elif count > k:
            least = middle
        else:
            most = middle - 1
    cut = _of_key(least)
    above = tl.full((), 0, tl.int32)
    for start in range(0, n, _CHUNK):
        here = start + tl.arange(0, _CHUNK)
        scores = tl.load(scaled + here, mask=here < n, other=float("-inf"))
        above += tl.sum((scores > cut).to(tl.int32), 0)
    equal = tl.full((), 0, tl.int32)
    cut_id = tl.full((), -1, tl.int32)
    for start in range(0, n, _CHUNK):
        here = start + tl.arange(0, _CHUNK)
        scores = tl.load(scaled + here, mask=here < n, other=float("-inf"))
        ties = ((scores == cut) & (here < n)).to(tl.int32)
        within = (ties != 0) & (equal + tl.cumsum(ties, 0) <= k - above)
        candidates = tl.load(ids + here, mask=here < n, other=-1)
        cut_id = tl.maximum(cut_id, tl.max(tl.where(within, candidates, -1), 0))
        equal += tl.sum(ties, 0)
    return cut, cut_id


@triton.jit
def _reaching(scaled: tl.tensor, n: tl.tensor, bound: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """How many candidates reach a score, and the lowest score of those."""
    count = tl.full((), 0, tl.int32)
    lowest = tl.full((), float("inf"), tl.float64)
    for start in range(0, n, _CHUNK):
        here = start + tl.arange(0, _CHUNK)
        scores = tl.load(scaled + here, mask=here < n, other=float("-inf"))
        reached = (scores >= bound) & (here < n)
        count += tl.sum(reached.to(tl.int32), 0)
        lowest = tl.minimum(lowest, tl.min(tl.where(reached, scores, float("inf")), 0))
    return count, lowest


@triton.jit
def _mass_ahead(
    scaled: tl.tensor, ids: tl.tensor, n: tl.tensor, cut: tl.tensor, cut_id: tl.tensor,
    top: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Sum of exponentials of the candidates down to a place, that one included."""
    mass = tl.full((), 0.0, tl.float64)
    for start in range(0, n, _CHUNK):
        here = start + tl.arange(0, _CHUNK)
        scores = tl.load(scaled + here, mask=here < n, other=float("-inf"))
        candidates = tl.load(ids + here, mask=here < n, other=_NOBODY)
        ahead = (here < n) & ((scores > cut) | ((scores == cut) & (candidates <= cut_id)))
        mass += tl.sum(tl.where(ahead, tl.exp(scores - top), 0.0), 0)
    return mass


@triton.jit
def _drawn(
    scaled: tl.tensor, ids: tl.tensor, n: tl.tensor, cut: tl.tensor, cut_id: tl.tensor,
    top: tl.tensor, top_id: tl.tensor, mass: tl.tensor, top_k: tl.tensor, top_p: tl.tensor,
    min_p: tl.tensor, seed: tl.tensor, draw: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """The winner of the race among the candidates down to a place that pass top-p and min-p."""
    winner = top_id
    searching = tl.full((), 1, tl.int32)
    while searching != 0:
        lead = tl.full((), float("-inf"), tl.float64)
        score = top
        winner = top_id
        for start in range(0, n, _CHUNK):
            here = start + tl.arange(0, _CHUNK)
            scores = tl.load(scaled + here, mask=here < n, other=float("-inf"))
            candidates = tl.load(ids + here, mask=here < n, other=_NOBODY)
            ahead = (here < n) & ((scores > cut) | ((scores == cut) & (candidates <= cut_id)))
            run = tl.where(ahead, _raced(scores, seed, draw, candidates), float("-inf"))
            first = tl.max(run, 0)
            if first > lead:
                lead = first
                winner = tl.min(tl.where(run == first, candidates, _NOBODY), 0)
                score = tl.max(tl.where(candidates == winner, scores, float("-inf")), 0)
        before = _mass_ahead(scaled, ids, n, score, winner - 1, top) / mass
        likely = tl.exp(score - top) / mass >= min_p * (1.0 / mass)
        likely = likely | ((top_k == 0) & (top_p >= 1.0))  # the bound was min-p itself
        passed = likely & ((before < top_p) | (top_p >= 1.0))
        if passed | (winner == top_id):
            searching = tl.full((), 0, tl.int32)
        else:
            cut = score
            cut_id = winner - 1
    return winner


@triton.jit
def _key(x: tl.tensor) -> tl.tensor:
    """An integer that is ordered like the fp64 number."""
    bits = x.to(tl.int64, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFFFFFFFFFF, bits)


@triton.jit
def _of_key(key: tl.tensor) -> tl.tensor:
    """The number of an integer that ``_key`` gave."""
    return tl.where(key < 0, key ^ 0x7FFFFFFFFFFFFFFF, key).to(tl.float64, bitcast=True)
