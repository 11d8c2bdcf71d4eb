from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from llmrun.engine.cache import KvCache
from llmrun.errors import ContextError, UnavailableError

FakeModel = Any  # defined in fake.py


def test_sizes_count_k_and_v_of_all_layers(fake: ModuleType) -> None:
    model = fake.make_model()
    half = KvCache(model.backend, model.spec, 1, 32, "f16")
    full = KvCache(model.backend, model.spec, 3, 32, "f32")
    # 2 (K, V) x 2 kv heads x 2 dims x 2 layers x bytes
    assert half.bytes_per_token == 2 * 2 * 2 * 2 * 2
    assert full.bytes_per_token == 2 * 2 * 2 * 2 * 4
    assert full.nbytes == 2 * model.backend.kv_layer(3, 32, model.spec.heads, "f32").nbytes


def test_a_window_bounds_what_a_step_reads(fake: ModuleType) -> None:
    model = fake.make_model(windows=(None, 4))
    cache = KvCache(model.backend, model.spec, 1, 32, "f32")
    per_layer = 2 * 2 * 2 * 4
    assert cache.read_bytes(3) == (3 + 3) * per_layer
    assert cache.read_bytes(10) == (10 + 4) * per_layer


def test_unknown_form_is_refused_with_the_known_ones(fake: ModuleType) -> None:
    model = fake.make_model()
    with pytest.raises(UnavailableError, match="f16, f32"):
        KvCache(model.backend, model.spec, 1, 8, "int3")


@pytest.mark.parametrize(
    ("held", "prompt", "kept"),
    [
        ([], [1, 2, 3], 0),
        ([1, 2, 9, 9], [1, 2, 3], 2),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1, 2, 3], 2),  # full match: the last id is computed again
        ([1, 2, 3, 4, 5], [1, 2, 3], 2),
        ([9, 2, 3], [1, 2, 3], 0),
        ([1], [1], 0),
        ([1, 2], [], 0),
    ],
)
def test_reuse_keeps_the_common_prefix(
    model: FakeModel,
    make_cache: Callable[..., KvCache],
    held: list[int],
    prompt: list[int],
    kept: int,
) -> None:
    cache = make_cache(model)
    cache.append(1, held)
    assert cache.reuse(1, prompt) == kept
    assert cache.ids(1) == tuple(held[:kept])


def test_truncate_and_fork_leave_other_slots_alone(
    model: FakeModel, make_cache: Callable[..., KvCache]
) -> None:
    cache = make_cache(model, n_slots=3)
    cache.append(0, [1, 2, 3])
    cache.append(2, [7])
    cache.fork(0, 1)
    cache.truncate(0, 1)
    cache.append(1, [4])
    assert [cache.ids(slot) for slot in range(3)] == [(1,), (1, 2, 3, 4), (7,)]
    assert model.backend.copies == [(layer, 0, 1, 3) for layer in cache.layers]


def test_r050_r055_too_long_says_both_numbers_and_the_ways_out(
    model: FakeModel, make_cache: Callable[..., KvCache]
) -> None:
    cache = make_cache(model, capacity=16)
    cache.check_prompt(15)
    cache.check_prompt(16)
    with pytest.raises(ContextError) as caught:
        cache.check_prompt(17)
    assert caught.value.exit_code == 7
    assert "17" in caught.value.what
    assert "16" in caught.value.what
    assert "--ctx 64" in caught.value.next_step  # as far as the model was trained
    with pytest.raises(ContextError) as caught:
        cache.check_prompt(65)
    assert "trained for 64" in caught.value.next_step
    assert "--ctx" not in caught.value.next_step


def test_r055_a_full_slot_takes_no_more(
    model: FakeModel, make_cache: Callable[..., KvCache]
) -> None:
    cache = make_cache(model, capacity=4)
    cache.append(0, [1, 2, 3])
    cache.check_room(0, 1)
    cache.check_room(1, 4)
    with pytest.raises(ContextError, match="holds 4 tokens; 3 are in use and 2 more"):
        cache.check_room(0, 2)
