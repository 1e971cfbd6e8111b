"""Models that generate, exported with their cache: token by token what PyTorch generates without one."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from onnx import numpy_helper
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from compressor import load
from compressor.checkpoint import save_checkpoint
from compressor.errors import CheckError, UserError
from compressor.models.anatomy import layers_of
from compressor.pruning.surgery import Removal, remove
from export.generation.generator_files import prove_generator
from export.generation.greedy import generate, open_generator, open_live
from export.graph.decoder import _sample_cache, _shapes, trace_encoder, trace_generator
from export.graph.files import save
from export.latency.worker import encoding, session_writer
from export.runtimes.decoders import Decoder
from export.runtimes.feeds import positions_of
from export.runtimes.sessions import session
from export.standalone.folder import export_folder
from export.standalone.source_model import find_model
from pipelines.cli.commands import main
from tests.compressor.conftest import plan_of, tiny
from tests.compressor.test_heads import GENERATES, NO_ATTENTION
from tests.export.conftest import check_wholly, notes
from tests.tiny import write_model, write_tokenizer

TOKENS = 64
FAST = [("llama", "cut")]
SLOW = [
    ("gpt2", "cut"),
    ("t5", "cut"),
    ("gpt2", "dense"),
    ("llama", "dense"),
    ("t5", "dense"),
    ("t5-gated", "dense"),
    ("t5-gated", "cut"),
]
TRIED = [*FAST, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)]
PROMPTS = [[5, 6, 7, 8, 9], [8, 9], [5, 7, 9]]


@dataclass(frozen=True)
class Exported:
    """A model and the folder that `compress export` made of its checkpoint, in every precision."""

    model: torch.nn.Module
    folder: Path

    @property
    def summary(self) -> dict:
        return json.loads((self.folder / "export.json").read_text())


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """(architecture, dense or cut) -> Exported, made on first use through the command line."""
    made: dict[tuple[str, str], Exported] = {}

    def make(architecture: str, kind: str) -> Exported:
        if (architecture, kind) not in made:
            root = tmp_path_factory.mktemp(architecture)
            model = tiny(architecture, torch.float32, auto=GENERATES[architecture], max_position_embeddings=128)
            if "t5" in architecture:  # a tied one says its first token for ever
                model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
            if kind == "cut":
                # GPT-2 keeps its first attention, so that both ways to count the tokens so far are tried
                removals, place = plan_of(architecture), NO_ATTENTION[architecture]
                if architecture != "gpt2":
                    removals[place] = Removal(heads=list(range(layers_of(model)[place].units("heads"))))
                remove(model, removals)
            write_tokenizer(root / "words", architecture.removesuffix("-gated"))
            save_checkpoint(model, root / "model", root / "words")
            options = ["--precision", "fp32,int8,int4", "--out", str(root / "onnx")]
            done = CliRunner().invoke(main, ["export", str(root / "model"), *options])
            assert done.exit_code == 0, done.output
            assert "generated alike" in done.output and "past_key_values of" in done.output
            made[architecture, kind] = Exported(load(root / "model"), root / "onnx")
        return made[architecture, kind]

    return make


@torch.no_grad()
def greedy(model, prompt: list[int], tokens: int) -> list[int]:
    """PyTorch, one row without padding or cache, the whole text anew for every token."""
    ids = torch.tensor([prompt])
    text = torch.tensor([[1]]) if model.config.is_encoder_decoder else ids
    for _ in range(tokens):
        given = {"input_ids": ids, "decoder_input_ids": text} if model.config.is_encoder_decoder else {"input_ids": text}
        text = torch.cat([text, model(**given, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return text[0, -tokens:].tolist()


def padded(rows: list[list[int]], side: str) -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask (rows, longest + 1), padded with 1 on the left, the right, or in between."""
    length = max(map(len, rows)) + 1
    ids, mask = np.ones((len(rows), length), np.int64), np.zeros((len(rows), length), np.int64)
    for number, row in enumerate(rows):
        spare = length - len(row)
        places = {"left": range(spare, length), "right": range(len(row)), "between": [0, *range(spare + 1, length)]}[side]
        ids[number, list(places)], mask[number, list(places)] = row, 1
    return ids, mask


@pytest.mark.slow
def test_the_encoder_of_a_text_to_text_model_gives_what_its_decoder_reads():
    outputs = trace_encoder(tiny("t5", torch.float32, auto=GENERATES["t5"])).graph.output
    assert [value.name for value in outputs] == [
        f"present.{block}.encoder.{name}" for block in "012" for name in ("key", "value")
    ]


@pytest.mark.parametrize("architecture, kind", TRIED)
def test_token_by_token(architecture, kind, exported):
    """One row, and three in a batch, wherever they are padded."""
    made = exported(architecture, kind)
    generator = open_generator(made.folder)
    free = {"ends": (), "pad": 1}
    expected = [greedy(made.model, prompt, TOKENS) for prompt in PROMPTS]
    assert len({token for row in expected for token in row}) > 3, "a text that shows something"
    for row, prompt in zip(expected, PROMPTS, strict=True):
        assert generator(*map(np.array, ([prompt], [[1] * len(prompt)])), TOKENS, **free).tolist() == [row]
    for side in ["right"] if made.model.config.is_encoder_decoder else ["left", "right", "between"]:
        assert generator(*padded(PROMPTS, side), TOKENS, **free).tolist() == expected


def test_a_latency_worker_writes_behind_the_same_prompt_every_time(exported, monkeypatch):
    writer = session_writer(open_live(exported("llama", "cut").folder))
    masks, prompts, call = [], encoding(2, 6, 99), Decoder.__call__
    monkeypatch.setattr(Decoder, "__call__", lambda self, *given: (call(self, *given), masks.append(self.mask.shape))[0])
    assert writer(prompts, 3) > 0 and writer(prompts, 2) > 0
    assert masks == [(2, 6), (2, 7), (2, 8), (2, 9), (2, 7), (2, 8)]
    assert writer(encoding(1, 4, 99), 1) > 0 and masks[-2:] == [(1, 4), (1, 5)]


@pytest.mark.parametrize("architecture, kind", TRIED)
def test_every_weight_is_there_once_and_axes_have_names(architecture, kind, exported):
    made = exported(architecture, kind)
    files = [one for one in made.summary["files"].values() if one["precision"] == "fp32"]
    size = sum(weight_bytes(made.folder / one["path"]) for one in files)
    embedding = 99 * 32 * 4  # a second one for the head, whose transpose is a constant here, and one for the encoder
    assert size < 4 * sum(parameter.numel() for parameter in made.model.parameters()) + 2 * embedding + 2000
    inputs, outputs = files[-1]["inputs"], files[-1]["outputs"]
    assert inputs["input_ids"] == ["batch", "sequence"] and outputs["logits"] == ["batch", "sequence", 99]
    middle = ".decoder" if len(files) > 1 else ""
    past = {name: shape for name, shape in inputs.items() if name.startswith("past") and ".encoder." not in name}
    for name, shape in past.items():
        assert name.endswith((f"{middle}.key", f"{middle}.value")) and shape[::2] == ["batch", "past"]
        grown = outputs[name.replace("past_key_values", "present")]
        assert grown == [*shape[:2], "past + sequence", shape[3]]
    assert len(outputs) == len(past) + 1


@pytest.mark.parametrize("architecture, kind", TRIED)
def test_every_file_is_valid_and_says_what_it_is(architecture, kind, exported):
    made = exported(architecture, kind)
    for one in made.summary["files"].values():
        check_wholly(made.folder / one["path"])
        told = notes(made.folder / one["path"])
        assert (told["task"], told["source"], "labels" in told) == ("generation", "model", False)


@pytest.mark.parametrize("architecture, kind", TRIED)
def test_fewer_bits_are_smaller_and_proven(architecture, kind, exported):
    made = exported(architecture, kind)
    assert [row["precision"] for row in made.summary["parity"]] == ["fp32", "int8", "int4"]
    assert all(row["passed"] for row in made.summary["parity"])
    assert made.summary["parity"][0]["generated_agreement"] == 1.0
    for part in {one["path"].split(".")[0].split("_int")[0] for one in made.summary["files"].values()}:
        sizes = [weight_bytes(made.folder / f"{part}{bits}.onnx") for bits in ("", "_int8", "_int4")]
        assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 3
        assert "MatMulNBits" in {node.op_type for node in onnx.load(made.folder / f"{part}_int4.onnx").graph.node}


def weight_bytes(path: Path) -> int:
    return sum(len(tensor.raw_data) for tensor in onnx.load(path).graph.initializer)


@pytest.mark.slow
def test_a_row_ends_at_its_end(exported):
    """The others go on; behind the end a row is padded, and all stop when the last has ended."""
    made = exported("gpt2", "cut")
    generator, (ids, mask) = open_generator(made.folder), padded(PROMPTS, "left")
    free = generator(ids, mask, 20, ends=(), pad=0)
    end = int(free[0, 3])
    found = generator(ids, mask, 20, ends=(end,), pad=98)
    lengths = [row.tolist().index(end) + 1 if end in row else 20 for row in free]
    assert found.shape[1] == max(lengths)
    for row, whole, length in zip(found, free, lengths, strict=True):
        assert row[:length].tolist() == whole[:length].tolist() and set(row[length:].tolist()) <= {98}
    assert generator(ids, mask, 0).shape == (3, 0)
    # one that has ended takes no more of the 128 positions
    rows = [np.random.default_rng(0).integers(4, 99, 120).tolist(), PROMPTS[1]]
    ids, mask = padded(rows, "left")
    (end, *_), free = generator(ids, mask, 8, ends=(), pad=0).tolist()
    assert end not in free, "otherwise both end"
    assert generator(ids, mask, 20, ends=(end,), pad=0)[1, :8].tolist() == free


@pytest.mark.parametrize("shape", [(1, 1), (8, 100)])
def test_any_batch_on_any_past(shape, exported):
    """Three calls on one past, of 1 token and of many: the logits of one call with all of them."""
    made = exported("llama", "cut")
    live, ids = session(made.folder / "model.onnx"), np.random.default_rng(0).integers(4, 99, (shape[0], shape[1] + 6))
    whole, pieces = Decoder(live, shape[0]), Decoder(live, shape[0])
    found = [pieces(part, np.ones_like(part)) for part in np.split(ids, [shape[1], shape[1] + 1], axis=1)]
    assert np.abs(np.concatenate(found, axis=1) - whole(ids, np.ones_like(ids))).max() < 1e-5
    with torch.no_grad():
        assert np.abs(np.concatenate(found, axis=1) - made.model(torch.from_numpy(ids)).logits.numpy()).max() < 1e-4


@pytest.mark.slow
def test_weights_beside_the_graph_generate_the_same(exported, tmp_path):
    made, (ids, mask) = exported("gpt2", "cut"), padded(PROMPTS, "right")
    save(onnx.load(made.folder / "model.onnx"), tmp_path / "model.onnx", limit=1000)
    assert (tmp_path / "model.onnx.data").stat().st_size > (tmp_path / "model.onnx").stat().st_size
    found = generate(session(tmp_path / "model.onnx"), ids, mask, 8)
    assert np.array_equal(found, open_generator(made.folder)(ids, mask, 8, ends=()))


def test_what_is_refused(exported, tmp_path):
    """Precisions and targets of the other kind, a cache that is none, and folders that hold no such export."""
    write_model(tmp_path / "base")
    save_checkpoint(tiny("bert", torch.float32), tmp_path / "classifier", tmp_path / "base")
    with pytest.raises(UserError, match=r"E624 .*int4"):
        export_folder(str(tmp_path / "classifier"), tmp_path / "onnx", precisions=["int4"])
    model = tiny("llama", torch.float32, auto=GENERATES["llama"])
    write_tokenizer(tmp_path / "words", "llama")
    save_checkpoint(model, tmp_path / "llama", tmp_path / "words")
    done = CliRunner().invoke(main, ["export", str(tmp_path / "llama"), "--out", str(tmp_path / "onnx"), "--tensorrt"])
    assert done.exit_code == 2 and "E624" in done.stderr
    remove(model, dict.fromkeys(range(3), Removal(heads=[0, 1])))
    with pytest.raises(UserError, match=r"E623 .*no block has attention"):
        trace_generator(model)
    behind = tiny("t5", torch.float32, auto=GENERATES["t5"])
    remove(behind, dict.fromkeys(range(3, 6), Removal(cross_heads=[0, 1, 2, 3])))
    with pytest.raises(UserError, match=r"E623 .*no block of the decoder attends to the encoder"):
        trace_generator(behind)
    assert not (tmp_path / "onnx").exists()
    with pytest.raises(UserError, match=r"E602 .*no export of a model that generates"):
        open_generator(tmp_path)
    with pytest.raises(UserError, match=r"E602 .*no model was exported in fp16.*fp32"):
        open_generator(exported("llama", "cut").folder, "fp16")


def test_one_head_of_size_1_is_no_emptied_attention():
    model = tiny("gpt2", torch.float32, auto=GENERATES["gpt2"], hidden_size=3, num_attention_heads=3)
    remove(model, {0: Removal(heads=[0, 1]), 1: Removal(heads=[0, 1, 2])})
    assert _shapes(_sample_cache(model)) == {"0": (1, 1), "2": (3, 1)}


@pytest.mark.slow
def test_a_decoder_that_counts_padding_as_positions(tmp_path):
    """BART's logits are others where its text is padded on the left, in PyTorch, too."""
    stacks = {
        f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in (("layers", 1), ("attention_heads", 4))
    }
    sizes = {"d_model": 32, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": 99, "max_position_embeddings": 140}
    special = {"decoder_start_token_id": 3, "forced_eos_token_id": None, "init_std": 0.2}
    config = AutoConfig.for_model("bart", **stacks, **sizes, **special)
    torch.manual_seed(0)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model", "t5")
    summary = export_folder(str(tmp_path / "model"), tmp_path / "onnx", precisions=["fp32"])
    assert summary["parity"][0]["passed"] and "padded on the left" in summary["parity"][0]["batches"]


def heavier(proto):
    """The last block's attention gives on three times what it should."""
    product = next(node for node in proto.graph.node if node.name == "model.model.layers.1.self_attn.o_proj")
    weight = next(one for one in proto.graph.initializer if one.name == product.input[1])
    weight.CopyFrom(numpy_helper.from_array(3 * numpy_helper.to_array(weight), weight.name))


def swapped(proto):
    """What was a key comes back as a value: right while nothing has come back."""
    names = {f"past_key_values.1.{one}": f"past_key_values.1.{other}" for one, other in (("key", "value"), ("value", "key"))}
    for node in proto.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]


@pytest.mark.parametrize(
    "spoil, suspect",
    [(heavier, "block 2"), (swapped, "the cache: without a past nothing parts")],
    ids=["a weight", "the cache"],
)
def test_a_wrong_graph_is_not_published(spoil, suspect, exported, tmp_path, monkeypatch):
    """The line tells which block it is (as the dense model counts them), or that it is none."""
    folder = exported("llama", "cut").folder
    graph = onnx.load(folder / "model.onnx")
    spoil(graph)
    monkeypatch.setattr("export.standalone.folder.trace_generator", lambda model: {"model": graph})
    with pytest.raises(CheckError, match=rf"E610 PyTorch -> model.onnx.*; suspected: {suspect}\)"):
        export_folder(str(folder.parent / "model"), tmp_path / "onnx", precisions=["fp32"], fuse=False)
    assert not list(tmp_path.iterdir())


def test_a_graph_that_is_wrong_behind_a_shorter_prompt_is_not_published(exported, monkeypatch):
    """Right with padding on either side: what counts as a position is only the padding between two passes."""

    def holes_count(mask):
        before, behind = mask.cumsum(axis=1) > 0, mask[:, ::-1].cumsum(axis=1)[:, ::-1] > 0
        return positions_of((before & behind).astype(np.int64))

    folder = exported("llama", "cut").folder
    loaded = find_model(str(folder.parent / "model"))
    monkeypatch.setattr("export.runtimes.decoders.positions_of", holes_count)
    with pytest.raises(CheckError, match=r"E610 PyTorch -> model.onnx.*found: padded in between: .*; suspected: the cache"):
        prove_generator(loaded, "fp32", [folder / "model.onnx"])


@pytest.mark.slow
@pytest.mark.skipif("SMOLLM2_FOLDER" not in os.environ, reason="SMOLLM2_FOLDER names no folder of SmolLM2-135M")
def test_smollm2(tmp_path):
    """The real thing: 64 tokens of text, alone and in a padded batch."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = os.environ["SMOLLM2_FOLDER"]
    summary = export_folder(source, tmp_path / "onnx", precisions=["fp32", "int8", "int4"])
    assert summary["parity"][0]["generated_agreement"] == 1.0
    assert summary["files"]["model"]["bytes"] < 4 * summary["parameters"] + 2_000_000
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(source)
    rows = [tokenizer(text)["input_ids"] for text in ("The capital of France is", "Once upon a time", "def add(a, b):")]
    generator = open_generator(tmp_path / "onnx")
    expected = []
    for row in rows:
        with torch.no_grad():
            made = model.generate(torch.tensor([row]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=[-1])
        expected.append(made[0, len(row) :].tolist())
    assert generator(*padded(rows[:1], "right"), TOKENS, ends=()).tolist() == expected[:1]
    for side in ("left", "right"):
        assert generator(*padded(rows, side), TOKENS, ends=()).tolist() == expected
