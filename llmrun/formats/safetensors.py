"""A plain Hugging Face folder: config.json and one or many safetensors files.

The index decides: exactly the tensors it names are loaded, each from the shard it names, and a
file it does not name is not touched. Without an index there must be one file. Missing shards are
reported by name before anything is opened.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from llmrun.errors import ModelFileError
from llmrun.formats.bounded_json import read_object
from llmrun.formats.checkpoint import Checkpoint, Format, TensorInfo
from llmrun.formats.damage import FETCH_AGAIN, PICKLES, damaged, pickled, shown
from llmrun.formats.limits import INDEX, INDEX_ENTRIES
from llmrun.formats.names import is_plain
from llmrun.formats.safetensors_header import BITS, StoredTensor, open_safetensors
from llmrun.kernels.forms import FLOATS, Dense, Form

CONFIG_NAME = "config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_PACKED = (".qweight", ".weight_packed")
_SAYS_HOW = "Use a version of the model whose config.json says how it is quantized."


def read_config(folder: Path) -> dict[str, object]:
    """Return a folder's config.json."""
    return read_object(folder / CONFIG_NAME, "the model's configuration")


def quantization_config(folder: Path) -> dict[str, object] | None:
    """Return ``quantization_config`` of a folder's config.json, None for a plain model."""
    value = read_config(folder).get("quantization_config")
    if value is not None and not isinstance(value, dict):
        raise damaged(folder / CONFIG_NAME, "quantization_config is not an object")
    return value


def open_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return every stored tensor of a folder by name; headers only, tensors are views."""
    index = folder / INDEX_NAME
    if not index.is_symlink() and not index.exists():
        return open_safetensors(_only_file(folder))
    weight_map = _weight_map(index)
    shards = sorted(set(weight_map.values()))
    missing = [name for name in shards if not (folder / name).exists()]
    if missing:
        raise damaged(index, f"names files that are missing: {', '.join(missing)}")
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        for name, stored in open_safetensors(folder / shard).items():
            if weight_map.get(name) != shard:
                raise damaged(index, f"does not map {shown(name)} to {shard}, which holds it")
            tensors[name] = stored
    absent = weight_map.keys() - tensors.keys()
    if absent:
        name = min(absent)
        raise damaged(index, f"maps {shown(name)} to {weight_map[name]}, which lacks it")
    return tensors


def _only_file(folder: Path) -> Path:
    entries = list(folder.iterdir())
    files = sorted(path for path in entries if path.suffix == ".safetensors")
    single = folder / SINGLE_NAME
    if single in files:
        return single
    if not files and any(path.suffix in PICKLES for path in entries):
        raise pickled(folder)
    if not files:
        raise ModelFileError(f"{folder} holds no safetensors file.", FETCH_AGAIN)
    if len(files) > 1:
        raise damaged(folder, f"{len(files)} safetensors files, but {INDEX_NAME} is missing")
    return files[0]


def _weight_map(index: Path) -> dict[str, str]:
    """Return the checked map from tensor name to shard; the stated total size is not trusted."""
    weight_map = read_object(index, "the index", INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise damaged(index, "there is no weight_map")
    if len(weight_map) > INDEX_ENTRIES:
        raise damaged(index, f"{len(weight_map):,} entries, over {INDEX_ENTRIES:,}")
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise damaged(index, f"{shown(name)} is not mapped to a file name")
    for shard in set(weight_map.values()):
        if not is_plain(shard) or not shard.endswith(".safetensors"):
            raise damaged(index, f"{shown(shard)} is not a plain name of a safetensors file")
    return weight_map


def dense(stored: StoredTensor) -> Dense:
    """Return a stored float tensor as it is."""
    array = stored.array()
    if array.dtype not in FLOATS:
        raise stored.refused(f"has dtype {stored.dtype}; a weight is F32, F16 or BF16")
    return Dense(array)


def info(stored: StoredTensor) -> TensorInfo:
    """Describe a stored tensor that is a logical tensor by itself.

    ModelFileError for floats of eight bits or fewer: they mean nothing without a scale.
    """
    if stored.dtype.startswith("F") and BITS[stored.dtype] <= 8:
        raise stored.refused(f"has dtype {stored.dtype}, and nothing says how it is scaled")
    return TensorInfo(stored.name, stored.shape, stored.dtype, stored.nbytes)


def _detect(path: Path) -> bool:
    return (path / CONFIG_NAME).exists() and quantization_config(path) is None


def _open(folder: Path) -> Checkpoint:
    config = read_config(folder)
    tensors = open_tensors(folder)
    packed = next((name for name in tensors if name.endswith(_PACKED)), None)
    if packed is not None:
        what = f"there is no quantization_config, but tensor {shown(packed)} is packed"
        raise damaged(folder / CONFIG_NAME, what, _SAYS_HOW)
    return Checkpoint(
        path=folder,
        layout="huggingface",
        config=config,
        tensors={name: info(stored) for name, stored in tensors.items()},
        read=partial(_read, tensors),
    )


def _read(tensors: Mapping[str, StoredTensor], name: str) -> Form:
    return dense(tensors[name])


FORMAT = Format("safetensors", _detect, _open)
