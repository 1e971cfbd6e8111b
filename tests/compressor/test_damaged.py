"""Checkpoints and states with a damaged file: E305 always, whatever the damage. A damage is a row."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from compressor import load
from compressor.checkpoint import save_checkpoint, save_state
from compressor.errors import UserError
from compressor.methods import Options, apply
from compressor.models.build import build
from compressor.models.reference import resolve
from compressor.pruning.surgery import Removal, remove
from tests.compressor.conftest import tiny, tuned
from tests.damage import content, filled, keys, raw, tensor, without
from tests.tiny import write_model

DEEP, DIGITS = '{"format": ' + "[" * 3000 + "]" * 3000 + "}", f'{{"format": {"9" * 5000}}}'
NOT_JSON = {"a list": "[]", "cut short": "{", "empty": "", "deep": DEEP, "digits": DIGITS, "no text": b"\xff\xfe{"}


def damaged(folder, change) -> str:
    change(folder)
    with pytest.raises(UserError) as caught:
        load(folder)
    assert caught.value.code == "E305" and "\n" not in str(caught.value), str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A state of a pruned model with deltas, a pruned checkpoint, and one with adapters."""
    root = tmp_path_factory.mktemp("stored")
    base = write_model(root / "base")
    model = build(base, ["a", "b"])
    remove(model, {0: Removal([1], [0, 5])})
    apply(model, "lora", Options(modules=("query",), rank=2, alpha=4.0))
    found = resolve(str(base))
    save_state(model, root / "state", base=str(base), base_sha256=found.sha256, label_names=["a", "b"])
    model = tiny("bert", torch.float32)
    remove(model, {0: Removal([1], [0, 5])})
    save_checkpoint(model, root / "checkpoint", base)
    save_checkpoint(tuned(tiny("bert", torch.float32), "adapter"), root / "inserts", base)
    for name in ("state", "checkpoint", "inserts"):
        load(root / name)
    return root


STATES = {
    **{f"state.json {name}": content("state.json", data) for name, data in NOT_JSON.items()},
    **{f"no {key}": without(key, "state.json") for key in ("format", "base", "labels", "weights_moved", "kept", "changes")},
    **{f"{key}: 5": keys("state.json", **{key: 5}) for key in ("base", "labels", "weights_moved", "kept", "changes", "format")},
    "an unhashable format": keys("state.json", format=[4]),
    "an unhashable Auto class": keys("state.json", auto_class=[4]),
    "a base without a name": keys("state.json", base={"sha256": "x"}),
    "labels that are numbers": keys("state.json", labels=[1, 2]),
    "another number of labels": keys("state.json", labels=["a", "b", "c"]),
    "a head that is not there": keys("state.json", kept={"0": {"heads": [99], "neurons": [1]}, "1": {}}),
    "no block kept": keys("state.json", kept={"7": {}}),
    "kept in words": keys("state.json", kept={"0": "all"}),
    "changes without links": keys("state.json", changes={}),
    "changes in words": keys("state.json", changes={"links": "x", "inserts": {}, "prototypes": {}}),
    "links of nothing": keys("state.json", changes={"links": {"x": [{}]}, "inserts": {}, "prototypes": {}}),
    **{
        f"{name} {damage}": change
        for name in ("head.safetensors", "changes.safetensors")
        for damage, change in {
            "cut short": raw(lambda data: data[:-1], name),
            "empty": content(name, b""),
            "gone": lambda folder, name=name: (folder / name).unlink(),
        }.items()
    },
    "NaN in the head": tensor(filled(float("nan")), "weight", "head.safetensors"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_damaged_state(stored, tmp_path, name):
    shutil.copytree(stored / "state", tmp_path / "state")
    damaged(tmp_path / "state", STATES[name])


@pytest.mark.parametrize(("number", "fix"), [(99, "A newer version made it: upgrade this one, or create it"), (1, "Create it")])
def test_a_state_of_another_format(stored, tmp_path, number, fix):
    shutil.copytree(stored / "state", tmp_path / "state")
    keys("state.json", format=number)(tmp_path / "state")
    with pytest.raises(UserError, match=rf"E305 .*has format {number}, this version reads \d\. {fix} again with this version"):
        load(tmp_path / "state")


CHECKPOINTS = {
    **{f"config.json {name}": content("config.json", data) for name, data in NOT_JSON.items()},
    "no model type": without("model_type"),
    "a model type in a list": keys(model_type=["compressed-bert"]),
    "a size in quotes": keys(hidden_size="32"),
    "5 heads": keys(num_attention_heads=5),
    "an activation": keys(hidden_act="evil"),
    "architectures: 5": keys(architectures=5),
    **{f"sizes {sizes!r}": keys(per_layer_config=sizes) for sizes in ("x", {"0": 5}, {"0": {"intermediate_size": "x"}})},
    "negative sizes": keys(per_layer_config={"0": {"num_attention_heads": -7}}),
    "all gone": keys(per_layer_config={str(place): {"skip": ["block"]} for place in range(3)}),
    "weights cut short": raw(lambda data: data[:-1]),
    "NaN": tensor(filled(float("nan"))),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_damaged_checkpoint(stored, tmp_path, name):
    shutil.copytree(stored / "checkpoint", tmp_path / "checkpoint")
    damaged(tmp_path / "checkpoint", CHECKPOINTS[name])


INSERTS = {
    **{name: content("inserts.json", data) for name, data in NOT_JSON.items()},
    "an empty object": content("inserts.json", "{}"),
    "inserts in words": keys("inserts.json", inserts={"x": "y"}),
    "links in a list": keys("inserts.json", links=[1]),
}


@pytest.mark.parametrize("name", INSERTS)
def test_damaged_inserts(stored, tmp_path, name):
    shutil.copytree(stored / "inserts", tmp_path / "inserts")
    damaged(tmp_path / "inserts", INSERTS[name])


def test_a_link_that_another_matrix_holds(stored, tmp_path):
    """A change whose path names no matrix of the model."""
    shutil.copytree(stored / "state", tmp_path / "state")
    found = json.loads((tmp_path / "state/state.json").read_text())["changes"]
    found["links"] = {key.replace("query", "nothing"): links for key, links in found["links"].items()}
    damaged(tmp_path / "state", keys("state.json", changes=found))
