"""What ``--calibrate`` reads, and what a model's layers see of it."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from llmrun.cli import calibration as module
from llmrun.cli import calibration_sampling as sampling
from llmrun.cli.calibration import Calibration, choose_calibration
from llmrun.cli.calibration_cost import predicted_seconds
from llmrun.cli.calibrator import LayerCalibrator
from llmrun.cli.conversation import Conversation, open_conversation
from llmrun.cli.source import Source, open_source
from llmrun.errors import DoesNotFitError, ModelFileError, UsageError
from llmrun.kernels.cpu import library as native
from llmrun.kernels.cpu.backend import CpuBackend
from llmrun.kernels.forms import Dense, Form
from llmrun.kernels.ops import Sizes
from llmrun.kernels.reference.arrays import as_tensor, to_host
from llmrun.kernels.reference.backend import TorchBackend
from llmrun.model.architecture import architectures
from llmrun.model.streaming import LayerStream
from llmrun.quant.dequantize import dequantize
from llmrun.quant.moments import LayerMoments
from llmrun.quant.scheme import find


def backend() -> TorchBackend:
    return TorchBackend("cpu", 1)


@pytest.fixture(scope="module")
def starter(starter_gguf: Path) -> Iterator[tuple[Source, Conversation]]:
    source = open_source(starter_gguf)
    conversation = open_conversation(starter_gguf, source, None)
    yield source, conversation
    conversation.template.close()


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "dense_rate", lambda _: 1e13)


def tiny(folder: Path, name: str = "llama", number: int = 0) -> Source:
    torch.manual_seed(0)
    wanted = deepcopy(dict(architectures()[name].tiny[number]))
    config = CONFIG_MAPPING[wanted["model_type"]](**wanted)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return open_source(folder)


@pytest.mark.usefixtures("fast")
def test_the_bundled_text_goes_through_the_models_template(
    starter: tuple[Source, Conversation],
) -> None:
    source, conversation = starter
    decision = choose_calibration("auto", source, conversation, backend, 2048)
    assert decision.calibration is not None
    sequences = decision.calibration.sequences
    assert [len(ids) for ids in sequences] == [512] * 4
    text = "".join(conversation.tokenizer.decode(ids, skip_special=False) for ids in sequences)
    assert "<|im_start|>user\n" in text
    assert "<|im_end|>" in text
    assert "%%" not in text
    assert decision.note == "calibrated on bundled text v1, 2,048 tokens, about 1 s"
    again = choose_calibration("bundled", source, conversation, backend, 2048)
    assert again.calibration is not None
    assert again.calibration.sha256 == decision.calibration.sha256
    longer = choose_calibration("bundled", source, conversation, backend, 2100)
    assert longer.calibration is not None
    assert longer.calibration.sha256 != decision.calibration.sha256


def test_no_text_is_read_unasked_where_that_takes_long(
    starter: tuple[Source, Conversation], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, conversation = starter
    monkeypatch.setattr(module, "dense_rate", lambda _: 4e9)
    decision = choose_calibration("auto", source, conversation, backend)
    assert decision.calibration is None
    assert "about 16 minutes" in decision.note
    asked = choose_calibration("bundled", source, conversation, backend)
    assert asked.calibration is not None
    assert choose_calibration("none", source, conversation, backend).calibration is None


def test_the_time_counts_the_experts_a_token_passes(tmp_path: Path) -> None:
    spec = tiny(tmp_path, "mixtral").binding.spec
    assert spec.mixture is not None
    every = predicted_seconds(
        replace(spec, mixture=replace(spec.mixture, top_k=spec.mixture.n_experts)), 100, 1e9
    )
    assert predicted_seconds(spec, 100, 1e9) < every < 1


def test_a_file_is_read_in_places_spread_over_it(
    starter: tuple[Source, Conversation], tmp_path: Path
) -> None:
    source, conversation = starter
    text = tmp_path / "mine.txt"
    text.write_text("".join(f"Sentence number {i} of the file.\n" for i in range(3000)))
    decision = choose_calibration(str(text), source, conversation, backend, 1024)
    assert decision.calibration is not None
    first, second = decision.calibration.sequences
    assert len(first) == len(second) == 512
    assert conversation.tokenizer.decode(first).startswith("Sentence number 0 ")
    assert "number 15" in conversation.tokenizer.decode(second)
    assert decision.calibration.description == "text of mine.txt, 1,024 tokens"


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00", b"too short"])
def test_a_file_that_cannot_be_used_is_refused(
    content: bytes | None, starter: tuple[Source, Conversation], tmp_path: Path
) -> None:
    text = tmp_path / "text"
    if content is not None:
        text.write_bytes(content)
    with pytest.raises(UsageError, match="calibration text"):
        choose_calibration(str(text), *starter, backend)


@pytest.mark.skipif(native.problem() is not None, reason=str(native.problem()))
def test_text_of_the_models_own_is_the_same_each_time(
    starter: tuple[Source, Conversation], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, conversation = starter
    made = [sampling.sampled(source, conversation, CpuBackend(2), 144, 48) for _ in range(2)]
    assert made[0] == made[1]
    assert [len(ids) for ids in made[0]] == [48] * 3
    assert len(set(made[0])) == 3
    monkeypatch.setattr(sampling.memory, "free_bytes", lambda: 1 << 20)
    with pytest.raises(DoesNotFitError, match="calibrate bundled"):
        choose_calibration("self", source, conversation, backend)


def test_what_sampling_takes_on_a_card_is_what_the_card_says(
    starter: tuple[Source, Conversation],
) -> None:
    source, conversation = starter
    weights = sum(source.kept_bytes().values())
    seen: list[Sizes] = []

    class Card(TorchBackend):
        free = 0

        def free_bytes(self) -> int | None:
            return self.free

        def workspace_bytes(self, sizes: Sizes) -> int | None:
            seen.append(sizes)
            return 5 << 20

    card = Card("cpu", 1)
    card.free = int(1.03 * weights) + (5 << 20)  # the cache is missing
    with pytest.raises(DoesNotFitError, match="calibrate bundled"):
        sampling.sampled(source, conversation, card, 48, 48)
    assert seen[0].vocab == source.binding.spec.vocab
    card.free += 8 << 20
    (made,) = sampling.sampled(source, conversation, card, 16, 16)
    assert len(made) == 16


def quantized(tensors: dict[str, Form]) -> dict[str, Form]:
    """Every matrix in int4, and as plain numbers again."""
    scheme = find("int4")
    return {
        name: Dense(dequantize(scheme.quantize(form.w)))
        if len(form.shape) == 2 and isinstance(form, Dense)
        else form
        for name, form in tensors.items()
    }


@pytest.mark.parametrize("propagate", [True, False])
def test_each_layer_sees_what_the_layers_before_it_give(propagate: bool, tmp_path: Path) -> None:
    source = tiny(tmp_path)
    text = Calibration(tuple(tuple(range(i, i + 100)) for i in range(4)), "some")
    calibrator = LayerCalibrator(source, backend(), text, gram=True, propagate=propagate)
    stream = LayerStream(source.binding.spec, backend(), text.sequences)
    stream.embed(source.outer())
    for number in range(len(source.binding.spec.layers)):
        moments, plain = LayerMoments(lambda names: True), source.layer(number)
        stream.fork().run_layer(number, plain, moments.observe)
        given, (wanted, _) = calibrator.inputs_of(number), moments.inputs()
        assert given.keys() == wanted.keys()
        for name, inputs in given.items():
            assert bytes(inputs.importance.data) == bytes(wanted[name].importance.data)
            assert inputs.gram is not None
            assert inputs.tokens == 400
        made = quantized(plain)
        calibrator.advance(number, made)
        stream.run_layer(number, made if propagate else plain)
    assert calibrator.unknown == []


def test_q09_experts_with_few_tokens_are_listed(tmp_path: Path) -> None:
    source = tiny(tmp_path, "mixtral")
    text = Calibration((tuple(range(120)), tuple(range(130))), "some")
    calibrator = LayerCalibrator(source, backend(), text, gram=True)
    inputs = calibrator.inputs_of(0)
    experts = [name for name in inputs if ".experts." in name]
    assert len(experts) == 3 * source.binding.spec.mixture.n_experts  # type: ignore[union-attr]
    assert set(calibrator.unknown) == set(inputs)  # 250 tokens in all say too little of anything
    assert all(set(as_tensor(i.importance).tolist()) == {1.0} for i in inputs.values())


def test_q10_a_model_that_overflows_is_told_apart_from_a_bad_text(tmp_path: Path) -> None:
    source = tiny(tmp_path)
    calibrator = LayerCalibrator(
        source, backend(), Calibration((tuple(range(20)),), "some"), gram=False
    )
    broken = dict(source.layer(0))
    name = "model.layers.0.mlp.down_proj.weight"
    broken[name] = Dense(to_host(torch.full(broken[name].shape, torch.inf)))
    calibrator.advance(0, broken)
    with pytest.raises(ModelFileError, match=r"layers\.1\.self_attn\.q_proj.*not finite"):
        calibrator.inputs_of(1)
