"""Models that generate and classifiers of tokens: cut, saved and loaded as classifiers of sequences are; with a cache, too."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForTokenClassification

import compressor.models.auto
from compressor import load
from compressor.checkpoint import save_checkpoint
from compressor.errors import UserError
from compressor.models.anatomy import layers_of
from compressor.models.architectures import ARCHITECTURES
from compressor.models.build import head_names
from compressor.pruning.surgery import Removal, remove, silence
from tests.compressor.conftest import encoding, plan_of, tiny
from tests.tiny import DECODERS

GENERATES = dict.fromkeys(DECODERS, AutoModelForCausalLM) | dict.fromkeys(("t5", "t5-gated"), AutoModelForSeq2SeqLM)
TAGS = [name for name in ARCHITECTURES if name != "t5"]
"""transformers' token classifier of a T5 has an encoder only, which is not the row's."""
MODELS = [(name, auto, tied) for name, auto in GENERATES.items() for tied in (True, False)]
MODELS += [(name, AutoModelForTokenClassification, True) for name in TAGS]
NO_ATTENTION = {name: 4 if name.startswith("t5") else 0 for name in GENERATES}
"""The block that loses all heads: the first, where the tokens in the cache are counted, and one behind an encoder."""


def logits(model) -> torch.Tensor:
    """Of `encoding()`; a decoder's inputs are its first tokens."""
    rows = encoding()
    more = (
        {"decoder_input_ids": rows["input_ids"][:, :4]} if hasattr(model, "lm_head") and "t5" in model.config.model_type else {}
    )
    with torch.no_grad():
        return model.eval()(**rows, **more).logits


@pytest.mark.parametrize("architecture, auto, tied", MODELS, ids=lambda one: getattr(one, "__name__", one))
def test_it_loads_with_the_same_bits(architecture, auto, tied, tmp_path):
    """Dense and cut, by `load` and by the Auto class."""
    model = tiny(architecture, torch.float32, auto=auto, tie_word_embeddings=tied)
    if not tied:  # as in Flan-T5: transformers ties a T5's all the same
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 0.1)
    for name, removals in (("dense", {}), ("cut", plan_of(architecture))):
        remove(model, removals) if removals else None
        save_checkpoint(model, tmp_path / name, tmp_path)
        for found in (load(tmp_path / name), auto.from_pretrained(tmp_path / name)):
            assert torch.equal(logits(found), logits(model))
            assert found.state_dict().keys() == model.state_dict().keys()
    assert type(found).__module__ == compressor.models.auto.__name__
    heads = {name.split(".")[0] for name in head_names(load(tmp_path / name))}
    if auto is AutoModelForTokenClassification:
        assert heads and heads <= {"classifier", "score", "head"}
    else:
        assert not heads, "a decoder's was pretrained"


@pytest.mark.parametrize("architecture", GENERATES)
def test_cut_equals_masked_token_by_token(architecture):
    """`generate` of transformers, which keeps a cache and pads on the left; some blocks have no attention."""
    models = [tiny(architecture, auto=GENERATES[architecture], max_position_embeddings=128) for _ in range(2)]
    place = NO_ATTENTION[architecture]
    heads = list(range(layers_of(models[0])[place].units("heads")))
    removals = {**plan_of(architecture), place: Removal(heads=heads)}
    remove(models[0], removals)
    silence(models[1], removals)
    rows = encoding(2, 7)
    rows = {"input_ids": rows["input_ids"].flip(1), "attention_mask": rows["attention_mask"].flip(1)}
    with torch.no_grad():
        cut, masked = (one.generate(**rows, max_new_tokens=20, do_sample=False, eos_token_id=None) for one in models)
    assert torch.equal(cut, masked)


def test_a_head_of_another_kind_is_refused(tmp_path):
    save_checkpoint(tiny("bert", torch.float32), tmp_path, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["BertForMaskedLM"]}))
    with pytest.raises(UserError, match=r"E308 .*BertForMaskedLM"):
        load(tmp_path)
