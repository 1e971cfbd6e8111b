"""The delta file: exact bits, exact size, one base for many tasks, and nothing that is not a whole delta of this base."""

import copy
import json
import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForSequenceClassification

import compressor
from compressor.compression import compression_of
from compressor.deltas.links import merge_all
from compressor.errors import UserError
from compressor.methods import Options, apply, trainable_counts
from compressor.models.anatomy import matrices_of
from compressor.models.modules import MODULES
from compressor.pruning.surgery import Removal, kept_of, remove
from compressor.storage import bits, delta_file
from compressor.storage.bits import Stored
from compressor.storage.changes import describe, pack, unpack
from compressor.storage.delta_comparison import compare
from compressor.storage.layout import accounts, fold, unfold
from compressor.storage.live import remember, strip
from pipelines.cli.delta_work import _facts
from tests.compressor.conftest import OPTIONS, logits, tiny, tuned
from tests.tiny import write_model

THREE = ("query", "value", "ffn_out")
LABELS = ["a", "b", "c"]


def write(model, path, *, sha256="0", labels=LABELS, head=True):
    delta_file.write(model, path, base="here", base_sha256=sha256, label_names=labels, head=head)
    return path


def live(architecture="bert", dtype=torch.float32, sha256="0"):
    """A bare base that knows what it is, as `compressor.load` gives it."""
    return remember(tiny(architecture, dtype), "here", sha256)


def bits_of(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def refused(code: str, call, *arguments, **named) -> str:
    with pytest.raises(UserError) as error:
        call(*arguments, **named)
    assert error.value.code == code
    return str(error.value)


# --- the format ---


def test_every_method_comes_back_bit_equal(pair, tmp_path):
    method, architecture = pair
    model = tuned(tiny(architecture, torch.float32), method, THREE)
    path = tmp_path / "x.safetensors"
    if method == "full":
        assert "moved the base" in refused("E312", write, model, path)
        return
    write(model, path)
    changes, tensors = describe(model)
    found = delta_file.read(path)
    assert found.changes == json.loads(json.dumps(changes)) and same(found.tensors, tensors)
    loaded = compressor.load(base=live(architecture), delta=path)
    assert torch.equal(logits(loaded), logits(model))
    again = write(loaded, tmp_path / "again.safetensors")
    assert again.read_bytes() == path.read_bytes()


def model_of(layers: int, hidden: int, method: str, options: Options):
    """A BERT of BERT-base's depth; Ω of unequal size in every matrix, as a global selection gives."""
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": 4 * hidden}
    config = AutoConfig.for_model("bert", **sizes, vocab_size=50, max_position_embeddings=16)
    model = AutoModelForSequenceClassification.from_config(config)
    compression_of(model).head_parameters = frozenset(
        name for name, _ in model.named_parameters() if not name.startswith("bert.")
    )
    matrices = matrices_of(model, options.modules)
    omega = {
        matrix.path: torch.arange(matrix.original.numel() - number, dtype=torch.int32) for number, matrix in enumerate(matrices)
    }
    apply(model, method, replace(options, omega=omega))
    return model, sum(len(places) for places in omega.values())


BASE_DEPTH, WIDTH = 12, 48
SIX = [(WIDTH, WIDTH)] * 4 + [(4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)]
SIZES = {
    "lora": ("lora", {}, lambda places: bits.low_rank(8, [(WIDTH, WIDTH)] * 24)),
    "lora on all": ("lora", {"modules": MODULES}, lambda places: bits.low_rank(8, SIX * 12)),
    "vera on all": ("vera", {"modules": MODULES}, lambda places: bits.vera(8, SIX * 12)),
    "selective": ("selective", {}, bits.sparse),
    "selective on all": ("selective", {"modules": MODULES}, bits.sparse),
    "dsee": ("dsee", {}, lambda places: bits.low_rank(8, [(WIDTH, WIDTH)] * 24) + bits.sparse(places)),
    "dsee on all": (
        "dsee",
        {"modules": MODULES},
        lambda places: bits.low_rank(8, SIX * 12) + bits.sparse(places),
    ),
    "adapter": ("adapter", {}, lambda places: bits.adapters(WIDTH, 6, 12)),
    "propetl adapter": ("propetl", {}, lambda places: bits.shared_adapter(WIDTH, 6, 12)),
    "propetl lora": ("propetl", {"shared": "lora"}, lambda places: bits.shared_low_rank(WIDTH, 8, 12)),
    "propetl prefix": ("propetl", {"shared": "prefix"}, lambda places: bits.shared_prefix(WIDTH, 5, 12)),
}


@pytest.mark.parametrize("case", SIZES)
def test_the_file_is_as_large_as_the_papers_say_and_a_short_header(case, tmp_path):
    """ProPETL equations 14, 16 and 18; 8 bytes a sparse value; 4 bytes an entry of a factor."""
    method, options, expected = SIZES[case]
    options = Options(rank=8, bottleneck=6, length=5, **options)
    model, places = model_of(BASE_DEPTH, WIDTH, method, options)
    path = write(model, tmp_path / "x.safetensors", labels=["bad", "good"], sha256="f" * 64)
    held = delta_file.stored(delta_file.read(path))
    assert held == expected(places)
    assert held.trained == trainable_counts(model)["body"]
    header, head = delta_file.header_size(path.read_bytes()), 4 * (2 * WIDTH + 2)
    assert header <= delta_file.HEADER_LIMIT
    assert path.stat().st_size == header + held.bytes + head
    bare = write(model, tmp_path / "bare.safetensors", labels=["bad", "good"], head=False)
    assert bare.stat().st_size == delta_file.header_size(bare.read_bytes()) + held.bytes


def test_a_description_that_is_too_long_moves_out_of_the_header(tmp_path):
    model, path = tuned(tiny("bert", torch.float32), "lora"), tmp_path / "x.safetensors"
    labels = [f"a class with a rather long name, number {number}" for number in range(3)]
    write(model, path, labels=[label * 40 for label in labels])
    assert delta_file.header_size(path.read_bytes()) <= delta_file.HEADER_LIMIT
    assert delta_file.read(path).labels == [label * 40 for label in labels]
    assert torch.equal(logits(compressor.load(base=live(), delta=path)), logits(model))


def test_a_twenty_four_layer_dsee_on_every_matrix_fits_the_header(tmp_path):
    model, _ = model_of(24, 24, "dsee", Options(rank=2, modules=MODULES))
    path = write(model, tmp_path / "x.safetensors", labels=["bad", "good"], sha256="f" * 64)
    data = path.read_bytes()
    assert delta_file.header_size(data) <= delta_file.HEADER_LIMIT and b'"description"' not in data


@given(st.lists(st.booleans(), max_size=70))
def test_masks_survive_packing(entries):
    mask = torch.tensor(entries, dtype=torch.bool)
    packed = pack(mask)
    assert len(packed) == (len(entries) + 7) // 8
    assert torch.equal(unpack(packed, (len(entries),)), mask)


TREES = st.recursive(
    st.integers(0, 3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(TREES, min_size=1, max_size=4))
def test_folding_loses_nothing(values):
    folded = fold(values)
    assert [unfold(folded, index) for index in range(len(values))] == values


def test_blocks_that_are_alike_are_described_once(tmp_path):
    found = delta_file.read(write(tuned(tiny("gpt2", torch.float32), "lora"), tmp_path / "x.safetensors"))
    rows = [tuple(row)[:4] for row in accounts(found.layout)]
    place = "transformer.h.*.attn.c_attn.weight"
    assert rows == [("low_rank", f"{place}[0:32]", 3, 3 * 128), ("low_rank", f"{place}[64:96]", 3, 3 * 128)]


# --- the papers' figures ---

ROBERTA, T5, DEPTH = 124_600_000, 222_900_000, 12


def test_bit_level_storage_as_published():
    """ProPETL tables 1 and 2 as methods.md 2.4 recomputes them: RoBERTa-base, 12 layers; T5-base, 24 layers and 8 tasks."""
    percent = lambda stored, parameters: 100 * stored.share(parameters)  # noqa: E731
    assert percent(bits.shared_adapter(768, 64, DEPTH), ROBERTA) == pytest.approx(0.109, abs=5e-4)
    assert percent(bits.adapters(768, 64, DEPTH), ROBERTA) == pytest.approx(0.955, abs=5e-4)
    assert percent(bits.masked_adapters(768, 64, DEPTH, 0.5), ROBERTA) == pytest.approx(0.481, abs=5e-4)
    assert percent(bits.shared_low_rank(768, 32, DEPTH), ROBERTA) == pytest.approx(0.108, abs=5e-4)
    assert percent(bits.shared_adapter(768, 64, 24 + 8), T5) / 8 == pytest.approx(0.01107, abs=5e-6)
    assert percent(bits.shared_adapter(768, 6, 24 + 8), T5) / 8 == pytest.approx(0.00108, abs=5e-6)


def test_bits_of_every_kind():
    assert bits.shared_prefix(768, 64, 12).bits == 32 * 2 * 64 * 768 + 2 * 64 * 768 * 12
    assert bits.sparse(10).bytes == 80
    assert (bits.low_rank(2, [(3, 4)]) + bits.sparse(5)).bits == 32 * 14 + 64 * 5
    assert Stored(mask_entries=9).bytes == 2


# --- many tasks on one base ---


def test_switching_tasks_leaves_the_base_and_repeats_bit_for_bit(tmp_path):
    model, kinds = live(), ("dsee", "adapter", "prefix", "propetl", "bitfit", "lora")
    bare = bits_of(model)
    tasks = {kind: tuned(tiny("bert", torch.float32), kind, THREE) for kind in kinds}
    for number, task in enumerate(tasks.values()):
        with torch.no_grad():
            task.classifier.weight.add_(number)
    paths = {kind: write(task, tmp_path / kind) for kind, task in tasks.items()}
    for kind in (*kinds, *reversed(kinds)):
        assert compressor.load(base=model, delta=paths[kind]) is model
        assert torch.equal(logits(model), logits(tasks[kind]))
    strip(model)
    assert model.config._attn_implementation == tiny("bert")._modules["bert"].config._attn_implementation
    now = bits_of(model)
    head = {name: now.pop(name) for name in compression_of(model).head_parameters}
    assert same(now, {name: tensor for name, tensor in bare.items() if name not in head})


def test_tasks_of_other_class_counts(tmp_path):
    three, model = tuned(tiny("bert", torch.float32), "lora"), live()
    two = tuned(tiny("bert", torch.float32), "dsee")
    two.classifier = torch.nn.Linear(32, 2)
    two.config.id2label = {0: "no", 1: "yes"}
    first, second = write(three, tmp_path / "three"), write(two, tmp_path / "two", labels=["no", "yes"])
    for path, task in ((first, three), (second, two), (first, three)):
        compressor.load(base=model, delta=path)
        assert torch.equal(logits(model), logits(task))
        assert model.config.num_labels == model.num_labels == model.classifier.out_features == len(logits(task)[0])
    assert list(model.config.id2label.values()) == LABELS
    headless = write(two, tmp_path / "headless", labels=["no", "yes"], head=False)
    assert "no task head" in refused("E311", compressor.load, base=model, delta=headless)
    # as many classes as the head that is there, but others: their names would be given to its answers
    headless = write(three, tmp_path / "headless", labels=["x", "y", "z"], head=False)
    assert "labels x, y, z" in refused("E311", compressor.load, base=model, delta=headless)
    write(three, headless, head=False)
    assert list(compressor.load(base=model, delta=headless).config.id2label.values()) == LABELS


def test_what_is_refused_leaves_the_live_model_as_it_was(tmp_path):
    good = tuned(tiny("bert", torch.float32), "lora")
    model = compressor.load(base=live(), delta=write(good, tmp_path / "good"))
    before = logits(model)
    other = write(good, tmp_path / "other", sha256="1")
    double = write(tuned(tiny("bert"), "lora"), tmp_path / "double")
    pruned = tuned(tiny("bert", torch.float32), "lora")
    remove(pruned, {1: Removal(heads=[0], neurons=[2, 3])})
    small = write(pruned, tmp_path / "pruned")
    assert "sha256 1" in refused("E306", compressor.load, base=model, delta=other)
    refused("E311", compressor.load, base=model, delta=double)
    refused("E311", compressor.load, base=model, delta=small)
    refused(
        "E311", compressor.load, base=model, delta=write(tuned(tiny("roberta", torch.float32), "lora"), tmp_path / "roberta")
    )
    assert torch.equal(logits(model), before)


def test_a_delta_of_another_size_is_refused_and_the_base_is_bare(tmp_path):
    wide = tuned(tiny("bert", torch.float32), "lora")
    link = wide.bert.encoder.layer[2].attention.self.value.parametrizations.weight[0]
    link.source.B = torch.nn.Parameter(torch.zeros(40, 2))
    model = live()
    before = logits(model)
    assert "another size" in refused("E311", compressor.load, base=model, delta=write(wide, tmp_path / "x"))
    assert torch.equal(logits(model), before)


def test_a_base_that_is_gone_is_refused(tmp_path):
    path = write(tuned(tiny("bert", torch.float32), "lora"), tmp_path / "x")
    refused("E311", compressor.load, base=tiny("bert", torch.float32), delta=path)
    merged = merge_all(compressor.load(base=live(), delta=path))
    assert "merged" in refused("E311", compressor.load, base=merged, delta=path)
    refused("E311", compressor.load, base=copy.deepcopy(live()), delta=path)
    moved = live()
    apply(moved, "full", OPTIONS)
    refused("E311", compressor.load, base=moved, delta=path)


def test_load_takes_one_base():
    with pytest.raises(TypeError, match="one base"):
        compressor.load("a", base="b", delta="c")


def test_from_a_folder_pruned_and_all(tmp_path):
    """A delta that names its base and what pruning left; live switching between two tasks of one pruned shape."""
    from compressor.models.hub import build, resolve

    found = resolve(str(write_model(tmp_path / "base")))
    kept, paths, expected = [], [], []
    for seed, method in enumerate(("dsee", "lora")):
        model = tuned(build(found.folder, LABELS, seed), method)
        remove(model, {0: Removal(heads=[1], neurons=[0, 5, 23]), 1: Removal(neurons=[7])})
        kept.append(kept_of(model))
        path = tmp_path / method
        delta_file.write(model, path, base=found.reference, base_sha256=found.sha256, label_names=LABELS)
        paths.append(path)
        expected.append(forward(model))
    assert delta_file.read(paths[0]).kept == kept[0]
    model = compressor.load(delta=paths[0])
    assert torch.equal(forward(model), expected[0])
    assert torch.equal(forward(compressor.load(model, delta=paths[1])), expected[1])
    assert torch.equal(forward(compressor.load(str(found.folder), delta=paths[1])), expected[1])
    other = write_model(tmp_path / "other", "mpnet")
    refused("E306", compressor.load, base=other, delta=paths[0])


def forward(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([[2, 5, 9, 3]])).logits


def test_a_loaded_state_can_switch_to_a_delta(tmp_path):
    from compressor.checkpoint import save_state
    from compressor.models.hub import build, resolve

    found = resolve(str(write_model(tmp_path / "base")))
    task = tuned(build(found.folder, LABELS), "lora")
    save_state(task, tmp_path / "state", base=found.reference, base_sha256=found.sha256, label_names=LABELS)
    other = tuned(build(found.folder, LABELS), "adapter")
    delta_file.write(other, tmp_path / "x", base=found.reference, base_sha256=found.sha256, label_names=LABELS)
    model = compressor.load(tmp_path / "state")
    assert torch.equal(forward(model), forward(task))
    assert torch.equal(forward(compressor.load(model, delta=tmp_path / "x")), forward(other))


# --- what is no delta ---


def test_damaged_and_foreign_files_are_refused(tmp_path):
    path = write(tuned(tiny("bert", torch.float32), "propetl"), tmp_path / "x")
    data, bad = path.read_bytes(), tmp_path / "bad"
    refused("E310", delta_file.read, tmp_path / "nothing")
    refused("E310", delta_file.read, tmp_path)
    for cut in (0, 7, 200, len(data) // 2, len(data) - 1):
        bad.write_bytes(data[:cut])
        refused("E310", delta_file.read, bad)
    start = delta_file.header_size(data)
    for place in (data.index(b"prototype"), data.index(b"0-2"), start, start + 100, len(data) - 1):
        bad.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        refused("E310", delta_file.read, bad)
    save_file({"x": torch.ones(2)}, bad)
    assert "no delta" in refused("E310", delta_file.read, bad)
    save_file({"x": torch.ones(2)}, bad, {delta_file.KEY: "[]"})
    refused("E310", delta_file.read, bad)
    save_file({"x": torch.ones(2)}, bad, {delta_file.KEY: '{"format": 7}'})
    assert "format 7" in refused("E310", delta_file.read, bad)


def test_what_a_delta_cannot_hold(tmp_path):
    model = tiny("bert", torch.float32)
    assert "nothing was added" in refused("E312", write, model, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


# --- comparing ---


def test_comparison_against_the_dense_deltas(tmp_path):
    models = [tuned(tiny("gpt2"), method, ("query", "ffn_out")) for method in ("dsee", "selective")]
    with torch.no_grad():
        for name, parameter in models[1].named_parameters():
            if name.endswith("values"):
                parameter.mul_(-2)
    paths = [write(model, tmp_path / str(number)) for number, model in enumerate(models)]
    rows = compare(*map(delta_file.read, paths))
    pairs = list(zip(*(matrices_of(model, ("query", "ffn_out")) for model in models), strict=True))
    assert len(rows) == len(pairs)
    by_place = {row.place.removesuffix("[0:32]").removesuffix(".weight"): row for row in rows}
    for a, b in pairs:
        row, x, y = by_place[a.path.removesuffix("[query]")], a.delta.flatten(), b.delta.flatten()
        assert row.kinds == ("low_rank+sparse", "sparse")
        assert row.norms == pytest.approx((float(x.norm()), float(y.norm())))
        assert row.cosine == pytest.approx(float(torch.cosine_similarity(x, y, dim=0)))
        assert row.jaccard == 1


def test_comparison_of_whole_matrices(tmp_path):
    """A dense ΔW, as mixout leaves it, against a sparse one."""
    models = [tuned(tiny("gpt2"), method, ("query", "ffn_out")) for method in ("mixout", "selective")]
    rows = compare(*(delta_file.read(write(model, tmp_path / str(number))) for number, model in enumerate(models)))
    pairs = list(zip(*(matrices_of(model, ("query", "ffn_out")) for model in models), strict=True))
    assert [row.kinds for row in rows] == [("offset", "sparse")] * len(pairs)
    expected = [float(torch.cosine_similarity(a.delta.flatten(), b.delta.flatten(), dim=0)) for a, b in pairs]
    assert sorted(row.cosine for row in rows) == pytest.approx(sorted(expected))


@pytest.mark.parametrize("case", ["adapter", "propetl"])
def test_modules_of_two_widths_have_norms_alone(case, tmp_path):
    rows = []
    for width in (3, 5):
        model = tiny("bert", torch.float32)
        apply(model, case, replace(OPTIONS, bottleneck=width))
        rows.append(delta_file.read(write(model, tmp_path / str(width))))
    for row in compare(*rows):
        assert row.cosine is row.jaccard is None and all(row.norms)


def test_models_cut_in_two_ways_have_norms_alone(tmp_path):
    models = [tuned(tiny("bert", torch.float32), "selective", places=200) for _ in range(2)]
    for head, model in enumerate(models):
        remove(model, {0: Removal(heads=[head])})
    rows = compare(*(delta_file.read(write(model, tmp_path / str(number))) for number, model in enumerate(models)))
    assert all(row.cosine is row.jaccard is None and all(row.norms) for row in rows)


def test_comparison_of_masks_and_of_what_only_one_changes(tmp_path):
    first, second = (tuned(tiny("bert", torch.float32, seed), "propetl") for seed in (0, 1))
    rows = compare(*(delta_file.read(write(model, tmp_path / name)) for model, name in ((first, "a"), (second, "b"))))
    masks = [model.bert.encoder.layer[0].output.dense.inserts[0].source for model in (first, second)]
    a, b = (torch.cat([mask.mask(name).flatten().bool() for name in ("down", "up")]) for mask in masks)
    assert rows[0].jaccard == pytest.approx(float((a & b).sum() / (a | b).sum()))
    lora = write(tuned(tiny("bert", torch.float32), "lora"), tmp_path / "c")
    alone = compare(delta_file.read(tmp_path / "a"), delta_file.read(lora))[0]
    assert alone.kinds == ("adapter", "-") and alone.norms[1] == 0 and alone.cosine is alone.jaccard is None


# --- a sealed file whose description is not what a writer here makes ---


def sealed(source, path, change):
    """A copy of a delta file whose description went through `change`, its checksum made anew; returns the path."""
    with safe_open(source, "pt") as stream:
        description = json.loads(stream.metadata()[delta_file.KEY])
        flat = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    del description["sha256"]
    description = change(description)
    text = json.dumps({**description, "sha256": delta_file._digest(description, flat)})
    save_file(flat, path, {delta_file.KEY: text})
    return path


@pytest.fixture(scope="module")
def dsee_file(tmp_path_factory):
    return write(tuned(tiny("bert", torch.float32), "dsee"), tmp_path_factory.mktemp("dsee") / "x.safetensors")


def shared_with_itself(description):
    return {**description, "shared": {"file": "y.safetensors", "sha256": "0"}}


def of_many_blocks(description):
    (paths, _, changes), *rest = description["changes"]["links"]
    return {**description, "changes": {**description["changes"], "links": [[paths * 50, "0-9999", changes], *rest]}}


@pytest.mark.parametrize(
    "change",
    [
        lambda one: {**one, "labels": ["a", 1, "c"]},
        lambda one: {**one, "labels": "abc"},
        lambda one: {**one, "base": 7},
        lambda one: {**one, "changes": 5},
        lambda one: {**one, "changes": {**one["changes"], "tasks": 5}},
        lambda one: {**one, "kept": 3},
        lambda one: {**one, "kept": {"blocks": [1], "sizes": {"heads": 1}}},
        lambda one: {**one, "head": [1]},
        lambda one: {**one, "head": {name: "x" for name in one["head"]}},
        lambda one: {**one, "shared": 4},
        lambda one: {**one, "shared": {"file": "../y", "sha256": "0"}},
        of_many_blocks,
        shared_with_itself,
    ],
)
def test_a_sealed_description_of_another_form_is_refused(dsee_file, tmp_path, change):
    """A checksum says that a file is as it was written, not by whom."""
    refused("E310", delta_file.read, sealed(dsee_file, tmp_path / "y.safetensors", change))


def test_a_description_that_python_cannot_parse_is_refused(dsee_file, tmp_path):
    with safe_open(dsee_file, "pt") as stream:
        flat = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    for text in ("[" * 100_000 + "]" * 100_000, '{"format": ' + "7" * 5000 + "}", '{"format": {"a": 1}}', "\ud7ff", "[]", "3"):
        save_file(flat, tmp_path / "x.safetensors", {delta_file.KEY: text})
        refused("E310", delta_file.read, tmp_path / "x.safetensors")
    os.mkfifo(tmp_path / "pipe")
    refused("E310", delta_file.read, tmp_path / "pipe")


def test_a_place_beyond_any_matrix_takes_no_memory(dsee_file, tmp_path):
    """Two sparse changes are compared at their places alone."""
    path = write(tuned(tiny("bert", torch.float32), "selective"), tmp_path / "x.safetensors")
    with safe_open(path, "pt") as stream:
        text = stream.metadata()[delta_file.KEY]
        flat = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    flat["indices"] = flat["indices"] + (2**31 - 1 - int(flat["indices"].max()))
    description = json.loads(text)
    del description["sha256"]
    seal = delta_file._digest(description, flat)
    save_file(flat, path, {delta_file.KEY: json.dumps({**description, "sha256": seal})})
    found = delta_file.read(path)
    assert all(row.cosine == pytest.approx(1) for row in compare(found, found))


VALUES = st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.text(max_size=4) | st.just([]) | st.just({})


def places_in(value, path=()):
    """The path of every value inside a JSON value."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places_in(one, (*path, key))


def put(value, path, new):
    if not path:
        return new
    value = copy.copy(value)
    value[path[0]] = put(value[path[0]], path[1:], new)
    return value


@pytest.mark.parametrize("method", ["dsee", "propetl", "prefix"])
def test_whatever_a_sealed_description_says_it_is_a_delta_or_a_mistake(method, tmp_path):
    """info, diff and apply alike: one value of the description is another, at random."""
    good = write(tuned(tiny("bert", torch.float32), method), tmp_path / "good.safetensors")
    base, whole, path = live(), delta_file.read(good), tmp_path / "bad.safetensors"
    with safe_open(good, "pt") as stream:
        places = list(places_in(json.loads(stream.metadata()[delta_file.KEY])))[1:]
    places = [place for place in places if place != ("sha256",)]

    @settings(max_examples=40, deadline=None, database=None)
    @given(st.sampled_from(places), VALUES)
    def spoil(place, value):
        sealed(good, path, lambda description: put(description, place, value))
        for use in (
            lambda: _facts(path, delta_file.read(path)),
            lambda: compare(delta_file.read(path), whole),
            lambda: compressor.load(base, delta=path),
        ):
            try:
                use()
            except UserError as error:
                assert error.code in ("E306", "E310", "E311", "E316")
            except delta_file.DAMAGED:  # the command says E310
                assert use.__code__.co_names[0] in ("_facts", "compare")

    spoil()
