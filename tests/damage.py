"""What is done to a sound model folder in the tests of the door: each function changes one thing, in place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Change = Callable[[Path], object]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def content(name: str, data: bytes | str) -> Change:
    """A file with other content."""
    raw = data.encode() if isinstance(data, str) else data
    return lambda folder: (folder / name).write_bytes(raw)


def keys(name: str = "config.json", **changed: Any) -> Change:
    """A JSON file with other keys."""
    return lambda folder: (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changed))


def without(key: str, name: str = "config.json") -> Change:
    """A JSON file that lacks a key."""

    def change(folder: Path) -> None:
        found = json.loads((folder / name).read_text())
        del found[key]
        (folder / name).write_text(json.dumps(found))

    return change


def raw(change: Callable[[bytes], bytes], name: str = WEIGHTS) -> Change:
    """A file whose bytes are changed."""
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def header(change: Callable[[dict], object], name: str = WEIGHTS) -> Change:
    """A safetensors file with another header; its tensors' bytes stay."""

    def changed(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        entries = json.loads(data[8 : 8 + length])
        change(entries)
        text = json.dumps(entries).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    return raw(changed, name)


def entry(change: Callable[[dict], object]) -> Change:
    """Another entry of the first tensor in the header."""
    return header(lambda entries: change(next(one for name, one in sorted(entries.items()) if name != "__metadata__")))


def tensor(change: Callable[[Any], Any], ending: str = "query.weight", name: str = WEIGHTS) -> Change:
    """One tensor changed by a function of it; None removes it."""

    def changed(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / name)
        key = next(key for key in sorted(tensors) if key.endswith(ending))
        tensors[key] = change(tensors[key].clone())
        save_file({key: one for key, one in tensors.items() if one is not None}, folder / name, metadata={"format": "pt"})

    return changed


def filled(value: float) -> Callable[[Any], Any]:
    """Three numbers of a tensor become `value`."""

    def fill(one: Any) -> Any:
        one.view(-1)[1:4] = value
        return one

    return fill


def sharded(change: Change = lambda folder: None, place: str = "sub/part.safetensors") -> Change:
    """The weights in a file that an index names, and then a change."""

    def changed(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        names = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).keys() - {"__metadata__"}
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / WEIGHTS).rename(folder / place)
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(sorted(names), place)}))
        change(folder)

    return changed


def link_out(name: str = "sub/part.safetensors") -> Change:
    """The file, by default the shard, lies elsewhere, and a link leads to it."""

    def change(folder: Path) -> None:
        elsewhere = folder.parent / "elsewhere"
        elsewhere.write_bytes((folder / name).read_bytes() if (folder / name).exists() else b"secret")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(elsewhere)

    return change


CODE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast
class Config(BertConfig):
    model_type = "evil"
class Model(BertForSequenceClassification):
    config_class = Config
class Words(PreTrainedTokenizerFast):
    pass
"""
AUTO_MAP = {"AutoConfig": "evil.Config", "AutoModelForSequenceClassification": "evil.Model"}


def with_code(**changed: Any) -> Change:
    """A folder with code of its own, which leaves a file `ran` beside it when it runs."""

    def change(folder: Path) -> None:
        (folder / "evil.py").write_text(CODE)
        keys(auto_map=AUTO_MAP, **changed)(folder)
        keys("tokenizer_config.json", tokenizer_class="Words", auto_map={"AutoTokenizer": [None, "evil.Words"]})(folder)

    return change
