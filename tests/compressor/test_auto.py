"""Pruned checkpoints through transformers' Auto classes, on every architecture: the same bits, and loud without our classes."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import TOKENIZER_MAPPING, AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer

import compressor.models.auto
from compressor import load
from compressor.checkpoint import save_checkpoint
from compressor.compression import compression_of
from compressor.cost import shape_of
from compressor.errors import UserError
from compressor.models.anatomy import layers_of
from compressor.models.architectures import ARCHITECTURES, COMPRESSED
from compressor.models.build import head_names
from compressor.pruning.surgery import Removal, remove
from tests.compressor.conftest import logits, plan_of, tiny
from tests.tiny import write_tokenizer


def pruned(architecture: str, folder, plan: dict[int, Removal] | None = None):
    """A model cut by a plan (PLAN), and its checkpoint."""
    model = tiny(architecture, torch.float32)
    remove(model, plan or plan_of(architecture))
    save_checkpoint(model, folder, folder)
    return model


def test_it_loads_saves_and_loads_again_with_the_same_bits(architecture, cut, tmp_path):
    """AutoModel..., `compressor.load` and save_pretrained agree, in bits and in what config.json says."""
    model = pruned(architecture, tmp_path / "first", cut)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "first")
    assert type(again).__module__ == compressor.models.auto.__name__ and type(again) is type(load(tmp_path / "first"))
    again.save_pretrained(tmp_path / "second")
    save_checkpoint(load(tmp_path / "second"), tmp_path / "third", tmp_path)
    for one in (again, load(tmp_path / "second"), AutoModelForSequenceClassification.from_pretrained(tmp_path / "third")):
        assert torch.equal(logits(one), logits(model))
        assert all(torch.equal(tensor, one.state_dict()[name]) for name, tensor in model.state_dict().items())
    written = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("first", "second", "third")]
    assert all(one["model_type"] == COMPRESSED + model.config.model_type for one in written)
    assert all("kept_sizes" not in one for one in written), "the sizes stand there once"
    for key in ("per_layer_config", "per_layer_config_of_decoder", "architectures"):
        assert written[0].get(key) == written[1].get(key) == written[2].get(key)


def test_the_bare_base_loads_too(architecture, tmp_path):
    """For embeddings: the same blocks, and no word about the task head."""
    model = pruned(architecture, tmp_path)
    base, expected = AutoModel.from_pretrained(tmp_path), model.base_model.state_dict()
    found = {name: tensor for name, tensor in base.state_dict().items() if name in expected or not name.startswith("pooler.")}
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_what_was_loaded_can_be_pruned_on(architecture, tmp_path):
    """The anatomy knows it: its row, its shape, and a cut on top."""
    pruned(architecture, tmp_path)
    found = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    compression_of(found).head_parameters = head_names(load(tmp_path))
    assert shape_of(found) == shape_of(load(tmp_path))
    remove(found, {0: Removal(neurons=[0])})
    save_checkpoint(found, tmp_path / "on", tmp_path)
    assert layers_of(load(tmp_path / "on"))[0].neurons == layers_of(load(tmp_path))[0].neurons - 1


@pytest.mark.slow
def test_without_our_classes_it_is_an_unknown_type(tmp_path):
    """Loud, in a process of its own: never another model. Only what is asked for is imported."""
    pruned("bert", tmp_path)
    program = f"""
import sys
import compressor
assert not {{"torch", "transformers"}} & set(sys.modules)
from transformers import AutoModelForSequenceClassification, BertForSequenceClassification
for kind, fault in ((AutoModelForSequenceClassification, ValueError), (BertForSequenceClassification, RuntimeError)):
    try:
        kind.from_pretrained({str(tmp_path)!r})
    except fault as error:
        print(str(error).splitlines()[0])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    unknown, unequal = done.stdout.splitlines()
    assert "compressed-bert" in unknown and "does not recognize" in unknown
    assert "per-layer attribute" in unequal


@pytest.mark.parametrize("change", ["missing", "unexpected"])
def test_tensors_that_are_not_the_models_are_refused(change, tmp_path):
    pruned("bert", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["strange"] = tensors.pop("classifier.bias") if change == "missing" else torch.zeros(1)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="E305"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path)


def test_sizes_that_are_not_the_files_are_refused(tmp_path):
    pruned("bert", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["per_layer_config"]["0"]["intermediate_size"] += 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_tokenizer_is_the_dense_models(architecture, tmp_path):
    """Where tokenizer_config.json names its class, and where the model type has to tell."""
    model = pruned(architecture, tmp_path / "pruned")
    model.config.save_pretrained(tmp_path / "dense")
    for folder in (tmp_path / "pruned", tmp_path / "dense"):
        write_tokenizer(folder, architecture)
    ours, theirs = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("pruned", "dense"))
    assert type(ours) is type(theirs) and ours("a good film") == theirs("a good film")
    config = AutoConfig.from_pretrained(tmp_path / "pruned")
    assert TOKENIZER_MAPPING.get(type(config), None) is TOKENIZER_MAPPING.get(type(model.config), None)


def test_a_dense_model_keeps_its_stock_type(tmp_path):
    save_checkpoint(tiny("bert", torch.float32), tmp_path, tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).model_type == "bert"
