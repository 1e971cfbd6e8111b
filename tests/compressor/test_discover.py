"""Proposing a row for an architecture without one: what is found, what is refused, and that nothing is taken on trust."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from transformers import AutoConfig

from compressor.errors import UserError
from compressor.models import architectures
from compressor.models.anatomy import layers_of
from compressor.models.architectures import ARCHITECTURES, row_of
from compressor.models.discovery import discover
from compressor.models.discovery.discover import as_code, proven_row
from compressor.models.discovery.small_model import small_config, small_model
from compressor.models.discovery.traced_row import propose
from compressor.models.row_file import ROW
from pipelines.cli.commands import main

FOUND = ("bert", "roberta", "xlm-roberta", "electra", "distilbert", "deberta-v2", "modernbert", "llama", "qwen3")
"""What has a row by hand and is found."""
ELSEWHERE = ("nomic_bert", "modernbert-decoder", "camembert", "opt", "mistral")
"""What has no row and is found."""


def config_of(model_type: str):
    """As large as the pretrained ones: only its small version is made."""
    keys = {"deberta-v2": {"share_att_key": True}, "llama": {"num_key_value_heads": 8}, "qwen3": {"num_key_value_heads": 8}}
    return AutoConfig.for_model(model_type, **keys.get(model_type, {}))


def folder_of(model_type: str, folder: Path, **keys) -> Path:
    AutoConfig.for_model(model_type, **keys).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("model_type", FOUND)
def test_what_is_found_is_the_row_by_hand(model_type):
    row, by_hand = proven_row(config_of(model_type)), ARCHITECTURES[model_type]
    (found,), (written,) = row.stacks, by_hand.stacks
    # nor does it look for the norm behind the FFN, which only adapters as AdapterHub's read
    assert found == replace(written, ffn_norm=None)
    assert (row.prefixes, row.head_on_tokens, row.positions) == (by_hand.prefixes, by_hand.head_on_tokens, by_hand.positions)
    # it cannot see that a ModernBERT's blocks know their own mask
    assert row.masks_by_place == (by_hand.masks_by_place or model_type == "modernbert")
    assert ARCHITECTURES[model_type] is by_hand, "nothing is registered"


@pytest.mark.parametrize("model_type", ELSEWHERE)
def test_a_row_is_proposed_proven_and_read_back(model_type):
    """As Python, pasted where architectures.py has its rows, and as JSON."""
    before = dict(ARCHITECTURES)
    row = proven_row(config_of(model_type))
    assert before == ARCHITECTURES, "nothing is registered"
    assert eval(as_code(row), vars(architectures)) == row
    assert ROW.validate_json(ROW.dump_json(row)) == row


@pytest.mark.parametrize(
    "model_type, why",
    [
        ("gpt2", "E318 .*no single stack of blocks has units"),  # Conv1D is unknown to torch-pruning
        ("t5", "E318 .*an encoder and a decoder"),
        ("mpnet", "E318 .*0 attentions and 1 FFNs"),  # its blocks share a position bias
        ("gpt_neox", r"E318 the proposed row does not hold: without heads 1 of block 0, .* differ by \d"),
        ("bloom", "E318 the proposed row does not hold: a model without heads 1 of block 0 ends in RuntimeError"),
        ("phi3", "E318 the proposed row does not hold: a model without heads 1"),  # cuts by the config's count of heads
        ("gptj", r"E318 .*torch-pruning cannot trace it \(RuntimeError"),
        ("squeezebert", r"E318 .*a small model cannot be made of it \(AssertionError"),
        ("albert", "E317 'albert' runs 3 blocks"),
    ],
)
def test_what_cannot_be_proposed_or_proven_is_refused(model_type, why):
    before = dict(ARCHITECTURES)
    with pytest.raises(UserError, match=why) as caught:
        proven_row(config_of(model_type))
    assert "\n" not in str(caught.value) and before == ARCHITECTURES


def test_a_wrong_proposal_is_never_shown(monkeypatch):
    """A gate or a value that is left whole."""

    def wrong(**change):
        def proposals(model, config):
            (row,) = propose(model, config)
            yield replace(row, stacks=(replace(row.stacks[0], **change),))

        return proposals

    blocks = proven_row(config_of("nomic_bert")).stacks[0]
    ungated = {name: path for name, path in blocks.modules.items() if name != "ffn_gate"}
    for change in ({"modules": ungated}, {"modules": {**blocks.modules, "value": "self_attn.q_proj"}}):
        monkeypatch.setattr(discover, "propose", wrong(**change))
        with pytest.raises(UserError, match="E318 the proposed row does not hold: "):
            proven_row(config_of("nomic_bert"))


@pytest.mark.slow
def test_a_walk_that_does_not_end_is_stopped(tmp_path):
    """The process ends with the limit."""
    with pytest.raises(UserError, match=r"E319 .*walk over the graph of a 'phi' did not end in 4 seconds"):
        discover.discover(folder_of("phi", tmp_path), seconds=4)


def test_the_search_runs_this_project_whatever_is_installed(tmp_path, monkeypatch):
    """From its source, where nothing is installed, its process would find no package `compressor`."""
    (tmp_path / "other" / "compressor").mkdir(parents=True)
    (tmp_path / "other" / "compressor" / "__init__.py").write_text("raise ImportError('another one')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "other"))
    with pytest.raises(UserError, match=r"E318 .*an encoder and a decoder"):
        discover.discover(folder_of("t5", tmp_path / "t5"))


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_shared_key_and_value_heads_are_in_the_trial_alone(model_type, monkeypatch):
    """A walk over the graph with them would not end; a row that was proven without them would say nothing of them."""
    seen = []
    monkeypatch.setattr(discover, "propose", lambda model, config: seen.append(config) or propose(model, config))
    monkeypatch.setattr(discover, "small_model", lambda config: seen.append(config) or small_model(config))
    proven_row(config_of(model_type))
    assert [config.num_key_value_heads for config in seen[:2]] == [4, 4]
    assert {config.num_key_value_heads for config in seen[2:]} == {2}


def test_small_models_keep_the_layout():
    """Types of blocks keep their order, ids stay inside the vocabulary."""
    config = small_config(AutoConfig.for_model("gemma3_text"), grouped=True)
    assert (config.num_key_value_heads, config.num_attention_heads, len(config.layer_types)) == (2, 4, 3)
    config = small_config(AutoConfig.for_model("camembert", vocab_size=32005, bos_token_id=5000), grouped=False)
    assert config.bos_token_id < config.vocab_size == 99 and config.pad_token_id == 1
    assert sum(one.numel() for one in small_model(config).parameters()) < 100_000


def show(*arguments: str):
    done = CliRunner().invoke(main, ["list", "architectures", *arguments])
    return done.exit_code, done.output, done.exception


@pytest.mark.slow
def test_the_command_prints_a_row_that_works_when_pasted(tmp_path, monkeypatch):
    """XLM-RoBERTa with its row hidden: what is printed is its row."""
    by_hand = ARCHITECTURES["xlm-roberta"]
    monkeypatch.delitem(ARCHITECTURES, "xlm-roberta")
    folder = folder_of("xlm-roberta", tmp_path)
    with pytest.raises(UserError, match=r"E301 .*compress list architectures --discover MODEL proposes a row"):
        row_of("xlm-roberta")
    code, output, _ = show("--discover", str(folder))
    assert code == 0 and "xlm-roberta" not in ARCHITECTURES
    (row,) = eval(output, vars(architectures))
    assert row.stacks == tuple(replace(blocks, ffn_norm=None) for blocks in by_hand.stacks)  # which is not looked for
    monkeypatch.setitem(ARCHITECTURES, "xlm-roberta", row)
    assert len(layers_of(small_model(small_config(config_of("xlm-roberta"), grouped=False)))) == 3
    code, output, _ = show("--discover", str(folder))
    assert code == 0 and output.strip() == "xlm-roberta is in the list already: compress list architectures"


def test_code_of_the_folder_never_runs(tmp_path):
    """One of a known type is made by transformers' own code; one of another is refused."""
    (tmp_path / "modeling.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Model: pass\nclass Config: pass\n")
    for model_type, expected in (("nomic_bert", 0), ("some_bert", 2)):
        config = AutoConfig.for_model("nomic_bert").to_dict()
        config |= {"model_type": model_type, "auto_map": {"AutoConfig": "modeling.Config", "AutoModel": "modeling.Model"}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        code, output, error = show("--json", "--discover", str(tmp_path))
        assert code == expected and not (tmp_path / "ran").exists()
        if expected:
            assert "E304" in f"{output}{error}"
        else:
            assert ROW.validate_json(output).model_type == model_type
