"""The delta file: exact bits, exact size, one base for many tasks, and nothing that is not a whole delta of this base."""

import copy
import functools
import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForSequenceClassification

import compressor
from compressor.checkpoint import save_state
from compressor.compression import compression_of
from compressor.deltas.kinds.refit import Refit
from compressor.deltas.links import merge_all
from compressor.methods import Options, apply, trainable_counts
from compressor.models.anatomy import matrices_of
from compressor.models.build import build
from compressor.models.modules import MODULES
from compressor.models.reference import resolve
from compressor.pruning.surgery import Removal, kept_of, remove
from compressor.storage import delta_file
from compressor.storage.bits import StoredBits
from compressor.storage.changes import describe_changes, pack, unpack
from compressor.storage.layout import accounts, fold, unfold
from compressor.storage.live import strip
from tests.compressor import papers_bits
from tests.compressor.conftest import OPTIONS, logits, tiny, tuned
from tests.compressor.delta_parts import LABELS, THREE, bits_of, live, refused, same, write
from tests.compressor.training_parts import with_classes
from tests.tiny import write_model

# --- the format ---


def test_every_method_comes_back_bit_equal(pair_of_case, tmp_path):
    method, architecture = pair_of_case
    model = tuned(tiny(architecture, torch.float32), method, THREE)
    path = tmp_path / "x.safetensors"
    if method.startswith("full"):
        assert "changed the base" in refused("E312", write, model, path)
        return
    write(model, path)
    changes, tensors = describe_changes(model)
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
    "lora": ("lora", {}, lambda places: papers_bits.low_rank(8, [(WIDTH, WIDTH)] * 24)),
    "lora on all": ("lora", {"modules": MODULES}, lambda places: papers_bits.low_rank(8, SIX * 12)),
    "vera on all": ("vera", {"modules": MODULES}, lambda places: papers_bits.vera(8, SIX * 12)),
    "selective": ("selective", {}, papers_bits.sparse),
    "selective on all": ("selective", {"modules": MODULES}, papers_bits.sparse),
    "dsee": ("dsee", {}, lambda places: papers_bits.low_rank(8, [(WIDTH, WIDTH)] * 24) + papers_bits.sparse(places)),
    "dsee on all": (
        "dsee",
        {"modules": MODULES},
        lambda places: papers_bits.low_rank(8, SIX * 12) + papers_bits.sparse(places),
    ),
    "adapter": ("adapter", {}, lambda places: papers_bits.adapters(WIDTH, 6, 12)),
    "propetl adapter": ("propetl", {}, lambda places: papers_bits.shared_adapter(WIDTH, 6, 12)),
    "propetl lora": ("propetl", {"shared": "lora"}, lambda places: papers_bits.shared_low_rank(WIDTH, 8, 12)),
    "propetl prefix": ("propetl", {"shared": "prefix"}, lambda places: papers_bits.shared_prefix(WIDTH, 5, 12)),
    "propetl adapter alone": (
        "propetl",
        {"keep": 1.0},
        lambda places: papers_bits.adapters(WIDTH, 6, 1),  # table 4, only share
    ),
    "propetl lora alone": (
        "propetl",
        {"shared": "lora", "keep": 1.0},
        lambda places: papers_bits.low_rank(8, [(WIDTH, WIDTH)] * 2),
    ),
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


def test_a_refit_is_stored_and_not_trained(tmp_path):
    model = tuned(tiny("bert", torch.float32), "lora", ("ffn_out",))
    plain = delta_file.stored(delta_file.read(write(model, tmp_path / "plain")))
    matrices = matrices_of(model, ("ffn_out",))
    for matrix in matrices:
        matrix.attach(Refit(torch.ones_like(matrix.original)))
    held = delta_file.stored(delta_file.read(write(model, tmp_path / "refitted")))
    entries = sum(matrix.original.numel() for matrix in matrices)
    assert held == replace(plain, untrained=entries) and held.trained == plain.trained == trainable_counts(model)["body"]
    assert held.bits == plain.bits + 32 * entries and (held + held).untrained == 2 * entries


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ([str(number) for number in range(10_001)], "labels: List should have at most 10000 items"),
        (["a", "b", "c" * 10_001], "labels.2: String should have at most 10000 characters"),
    ],
    ids=["too many", "too long"],
)
def test_what_could_not_be_read_is_not_written(labels, says, tmp_path):
    model = tuned(with_classes("bert", len(labels), torch.float32), "lora")
    assert says in refused("E312", write, model, tmp_path / "x", labels=labels)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("stored", "printed"),
    [
        (papers_bits.shared_adapter(768, 64, 12), 32 * (2 * 64 * 768 + 64 + 768) + 2 * 64 * 768 * 12),  # equation 14
        (papers_bits.masked_adapters(768, 64, 12, 0.5), 32 * (64 * 768 + 64 + 768) * 12),  # 15
        (papers_bits.shared_low_rank(768, 32, 12), 32 * 4 * 32 * 768 + 4 * 32 * 768 * 12),  # 16
        (papers_bits.masked_low_rank(768, 32, 12, 0.5), 32 * 2 * 32 * 768 * 12),  # 17
        (papers_bits.shared_prefix(768, 64, 12), 32 * 2 * 64 * 768 + 2 * 64 * 768 * 12),  # 18
        (papers_bits.masked_prefixes(768, 64, 12, 0.5), 32 * (64 * 768 * 12)),  # 19, printed without its 32 bits
    ],
)
def test_bits_of_the_equations(stored, printed):
    """ProPETL appendix B at its sizes for RoBERTa-base: d 768, L 12, bn 64 or 32, l 64, k 0.5."""
    assert stored.bits == printed


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
    """ProPETL tables 1 and 2, recomputed: RoBERTa-base, 12 layers; T5-base, 24 layers and 8 tasks."""
    percent = lambda stored, parameters: 100 * stored.share(parameters)  # noqa: E731
    assert percent(papers_bits.shared_adapter(768, 64, DEPTH), ROBERTA) == pytest.approx(0.109, abs=5e-4)
    assert percent(papers_bits.adapters(768, 64, DEPTH), ROBERTA) == pytest.approx(0.955, abs=5e-4)
    assert percent(papers_bits.masked_adapters(768, 64, DEPTH, 0.5), ROBERTA) == pytest.approx(0.481, abs=5e-4)
    assert percent(papers_bits.shared_low_rank(768, 32, DEPTH), ROBERTA) == pytest.approx(0.108, abs=5e-4)
    assert percent(papers_bits.shared_adapter(768, 64, 24 + 8), T5) / 8 == pytest.approx(0.01107, abs=5e-6)
    assert percent(papers_bits.shared_adapter(768, 6, 24 + 8), T5) / 8 == pytest.approx(0.00108, abs=5e-6)


def test_bits_of_every_kind():
    assert papers_bits.shared_prefix(768, 64, 12).bits == 32 * 2 * 64 * 768 + 2 * 64 * 768 * 12
    assert papers_bits.sparse(10).bytes == 80
    assert (papers_bits.low_rank(2, [(3, 4)]) + papers_bits.sparse(5)).bits == 32 * 14 + 64 * 5
    assert StoredBits(mask_entries=9).bytes == 2


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


def test_as_many_classes_as_a_hidden_layer_of_the_head_is_wide(tmp_path):
    """DistilBERT's head has one: it stays as it is where a task has fewer classes."""
    tasks = {count: tuned(with_classes("distilbert", count, torch.float32), "lora") for count in (32, 2)}
    paths = {count: write(task, tmp_path / str(count), labels=[*map(str, range(count))]) for count, task in tasks.items()}
    model = live("distilbert")
    for count in (32, 2, 32):
        compressor.load(base=model, delta=paths[count])
        assert torch.equal(logits(model), logits(tasks[count]))


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


def test_what_was_loaded_before_answers_no_delta_without_a_head_that_the_base_s_own_is_for(tmp_path):
    own = ["no", "yes"]
    names = {"id2label": {1: "yes", 0: "no"}, "label2id": {"no": 0, "yes": 1}}
    found = resolve(str(write_model(tmp_path / "base", auto="AutoModelForSequenceClassification", **names)))
    facts = {"base": found.reference, "base_sha256": found.sha256}

    def written(name, labels, *, head):
        task = tuned(build(found.folder, labels, 1), "lora")
        with torch.no_grad():
            task.classifier.bias.add_(float(head))
        delta_file.write(task, tmp_path / name, **facts, label_names=labels, head=head)
        return tmp_path / name

    bare, with_head = written("bare", own, head=False), written("with head", own, head=True)
    others, bare_others = written("others", LABELS, head=True), written("bare others", LABELS, head=False)
    fresh = compressor.load(delta=bare)
    expected = forward(fresh)
    assert torch.equal(forward(compressor.load(fresh, delta=bare)), expected)
    for before in ([with_head], [others, with_head]):
        live = functools.reduce(lambda model, path: compressor.load(model, delta=path), before, found.folder)
        told = refused("E311", compressor.load, live, delta=bare)
        assert "no task head, and another task's has replaced the base's own. Load it on its own base's folder" in told
    state = tuned(build(found.folder, own), "bitfit")
    save_state(state, tmp_path / "state", **facts, label_names=own)
    assert "has replaced the base's own" in refused("E311", compressor.load, compressor.load(tmp_path / "state"), delta=bare)
    # the base has no head for these labels: the live one is meant, whatever was loaded before it
    four = written("four", [*LABELS, "d"], head=True)
    for before in ([others], [four, with_head, others]):
        live = functools.reduce(lambda model, path: compressor.load(model, delta=path), before, found.folder)
        expected = forward(live)
        assert torch.equal(forward(compressor.load(live, delta=bare_others)), expected)


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
    # a model that is converted to another type and back is rounded, and says nothing of it
    told = refused("E311", compressor.load, base=model, delta=double)
    assert "the delta is float64, the model float32. Load it on the base's folder: load(base='here', delta=...)" in told
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
    found = resolve(str(write_model(tmp_path / "base")))
    task = tuned(build(found.folder, LABELS), "lora")
    save_state(task, tmp_path / "state", base=found.reference, base_sha256=found.sha256, label_names=LABELS)
    other = tuned(build(found.folder, LABELS), "adapter")
    delta_file.write(other, tmp_path / "x", base=found.reference, base_sha256=found.sha256, label_names=LABELS)
    model = compressor.load(tmp_path / "state")
    assert torch.equal(forward(model), forward(task))
    assert torch.equal(forward(compressor.load(model, delta=tmp_path / "x")), forward(other))


@pytest.mark.parametrize(
    ("method", "dtype"),
    [(method, torch.float64) for method in ("lora", "dsee", "adapter", "prefix", "propetl", "vera", "full")]
    + [(method, dtype) for method in ("lora", "adapter") for dtype in (torch.bfloat16, torch.float16)],
    ids=str,
)
def test_numbers_of_every_type_come_back_on_a_folder(method, dtype, tmp_path):
    """The base gets the type that it had when it was tuned, for a delta file and for a state."""
    found = resolve(str(write_model(tmp_path / "base")))
    model = tuned(build(found.folder, LABELS).to(dtype), method)
    facts = {"base": found.reference, "base_sha256": found.sha256, "label_names": LABELS}
    save_state(model, tmp_path / "state", **facts)
    loaded = [compressor.load(tmp_path / "state")]
    if method != "full":
        delta_file.write(model, tmp_path / "delta", **facts)
        loaded.append(compressor.load(delta=tmp_path / "delta"))
    for again in loaded:
        assert {parameter.dtype for parameter in again.parameters()} == {dtype}
        assert torch.equal(forward(again), forward(model))
