"""`compress delta` as a user meets it, on a tiny base with real parts."""

import errno
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

import compressor
from compressor import methods
from compressor.checkpoint import save_state
from compressor.deltas.links import merge_all
from compressor.models.build import GENERATES, TEXT2TEXT, TOKENS, build
from compressor.models.reference import resolve
from compressor.pruning.surgery import Removal, remove
from compressor.storage import delta_file
from compressor.storage.live import remember
from compressor.storage.peft.read import CONFIG
from compressor.storage.peft.write import write_peft
from pipelines.cli.work import delta_work, stack_work
from pipelines.cli.work.delta_work import _loadable
from pipelines.terminal.console_table import table
from tests.compressor.conftest import OPTIONS, tuned
from tests.tiny import write_model


@pytest.fixture
def base(tmp_path):
    return resolve(str(write_model(tmp_path / "base")))


def task(base, method, seed=0):
    """A tuned task with labels `bad` and `good`."""
    return tuned(build(base.folder, ["bad", "good"], seed), method)


@pytest.fixture
def file(base, tmp_path):
    """A DSEE delta file that names the base by its folder."""
    return write(base, task(base, "dsee"), tmp_path / "dsee.safetensors")


def write(base, model, path):
    delta_file.write(model, path, base=base.reference, base_sha256=base.sha256, label_names=["bad", "good"])
    return path


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([[2, 5, 9, 3]])).logits


@pytest.mark.parametrize("command", [(), ("info",), ("apply",), ("diff",), ("convert",), ("stack",)])
def test_every_help_has_an_example(compress, command):
    code, shown, _ = compress("delta", *command, "--help")
    assert code == 0
    assert f"Example: compress delta {' '.join(command)}".rstrip() in shown


def test_info(compress, base, file):
    code, shown, _ = compress("delta", "info", file)
    assert code == 0
    assert "bert.encoder.layer.*.attention.self.query.weight" in shown and "low_rank" in shown and "sparse" in shown
    places, factors = 2 * 2 * 5, 2 * 2 * 2 * 64
    assert f"bits     32 x {places + factors:,} + 32 x {places} + 0 = {64 * places + 32 * factors:,}" in shown
    assert "labels   bad, good" in shown and base.sha256[:12] in shown
    facts = json.loads(compress("delta", "info", file, "--json")[1])
    assert facts["trained"] == places + factors and facts["base_sha256"] == base.sha256
    assert facts["bytes"] == file.stat().st_size == facts["header_bytes"] + facts["stored"]["bytes"] + facts["head_bytes"]
    assert facts["other_bytes"] == 0


def test_info_of_names_that_a_terminal_obeys(compress, base, tmp_path):
    model, names = task(base, "lora"), {"base": "\x1b[2Jx", "label_names": ["a\nb", "\u202ec"]}
    delta_file.write(model, tmp_path / "delta", base_sha256=base.sha256, **names)
    _, shown, _ = compress("delta", "info", tmp_path / "delta")
    assert "base     \\x1b[2Jx (sha256" in shown and "labels   a\\nb, \\u202ec\n" in shown
    facts = json.loads(compress("delta", "info", tmp_path / "delta", "--json")[1])
    assert (facts["base"], facts["labels"]) == (names["base"], names["label_names"])


def test_apply_writes_the_merged_model(compress, base, file, tmp_path, capfd):
    out = tmp_path / "out"
    capfd.readouterr()
    assert compress("delta", "apply", file, "--base", base.folder, "--out", out) == (0, f"merged: {out}\n", "")
    assert torch.equal(logits(compressor.load(out)), logits(merge_all(compressor.load(delta=file))))
    assert (out / "tokenizer.json").is_file()
    code, _, error = compress("delta", "apply", file, "--out", out)
    assert (code, error.splitlines()[-1][:4]) == (2, "E801")
    code, _, error = compress("delta", "apply", file, "--out", file / "merged")
    assert code == 2 and error.splitlines()[-1].startswith(f"E801 {file}: a file, where a folder is needed")
    other = write_model(tmp_path / "other", "mpnet")
    code, _, error = compress("delta", "apply", file, "--base", other, "--out", tmp_path / "no")
    assert (code, error.splitlines()[-1][:4], (tmp_path / "no").exists()) == (2, "E306", False)


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_read(compress, tmp_path, monkeypatch):
    monkeypatch.setattr("pipelines.engine.disk.os.access", lambda path, mode: path != tmp_path)
    code, _, error = compress("delta", "apply", tmp_path / "missing", "--out", tmp_path / "new" / "merged")
    assert (code, error) == (2, f"E801 {tmp_path}: no permission to write here. Give another name\n")


@pytest.mark.parametrize("command", ["apply", "convert"])
def test_nothing_half_written_stays(compress, base, file, tmp_path, monkeypatch, command):
    """A later attempt must not be refused for what an interrupted one left, nor a half be taken for a model."""
    writers = {"apply": "save_checkpoint", "convert": "write_peft"}
    arguments = {
        "apply": ("apply", file, "--out", tmp_path / "out"),
        "convert": ("convert", file, tmp_path / "out", "--to", "peft"),
    }

    def half(_model, place, *_, **__):
        place.mkdir()
        (place / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    before = sorted(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(delta_work, writers[command], half)
        assert compress("delta", *arguments[command])[0] != 0
    assert sorted(tmp_path.iterdir()) == before
    assert compress("delta", *arguments[command])[0] == 0 and (tmp_path / "out").is_dir()


@pytest.mark.parametrize("command", ["apply", "convert"])
def test_what_another_program_wrote_meanwhile_is_not_replaced(compress, base, file, tmp_path, monkeypatch, command):
    name, out = {"apply": "save_checkpoint", "convert": "write_peft"}[command], tmp_path / "out"
    writer = getattr(delta_work, name)

    def beside_another(*arguments, **named):
        out.mkdir()
        (out / "other").touch()
        return writer(*arguments, **named)

    monkeypatch.setattr(delta_work, name, beside_another)
    more = {"apply": ("--out", out), "convert": (out, "--to", "peft")}[command]
    code, _, error = compress("delta", command, file, *more)
    assert (code, error.splitlines()[-1]) == (2, f"E801 '{out}' is there already. Give another name, or remove it")
    assert [path.name for path in out.iterdir()] == ["other"] and not list(tmp_path.glob(".*"))


def test_a_file_that_another_program_wrote_meanwhile_is_not_replaced(compress, base, file, tmp_path, monkeypatch):
    out, opened = tmp_path / "out.safetensors", delta_work._open

    def beside_another(*arguments):
        out.write_text("other")
        return opened(*arguments)

    monkeypatch.setattr(delta_work, "_open", beside_another)
    code, _, error = compress("delta", "convert", file, out)
    assert (code, error.splitlines()[-1]) == (2, f"E801 '{out}' is there already. Give another name, or remove it")
    assert out.read_text() == "other"


def test_an_empty_folder_that_is_there_stays(compress, base, file, tmp_path, monkeypatch):
    """It may be the current one, a link, or a mount."""
    (tmp_path / "here").mkdir()
    (tmp_path / "linked").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "linked")
    monkeypatch.chdir(tmp_path / "here")
    assert compress("delta", "convert", file, ".", "--to", "peft")[0] == 0
    assert compress("delta", "apply", file, "--out", tmp_path / "link")[0] == 0
    assert (tmp_path / "here" / CONFIG).is_file() and (tmp_path / "linked" / "config.json").is_file()
    assert (tmp_path / "link").is_symlink() and not list(tmp_path.glob(".*"))


def test_diff(compress, base, file, tmp_path):
    other = write(base, task(base, "selective"), tmp_path / "other.safetensors")
    code, shown, _ = compress("delta", "diff", file, other)
    assert code == 0 and "Jaccard" in shown
    rows = json.loads(compress("delta", "diff", file, other, "--json")[1])
    assert [row["kinds"] for row in rows] == [["low_rank+sparse", "sparse"]] * 4
    assert all(row["jaccard"] == 1 and 0 < abs(row["cosine"]) < 1 for row in rows)
    rows = json.loads(compress("delta", "diff", file, file, "--json")[1])
    assert all(row["cosine"] == pytest.approx(1) for row in rows)


def test_diff_cuts_no_name_and_says_why_a_cosine_is_missing(compress, base, file, tmp_path):
    same = compress("delta", "diff", file, file)[1]
    assert "places below bert.encoder.layer" in same and "no cosine" not in same
    for name in ("query", "value"):
        assert all(f" {layer}.attention.self.{name}.weight " in same for layer in (0, 1))
    pruned = build(base.folder, ["bad", "good"])
    remove(pruned, {0: Removal(heads=[1])})
    cut = write(base, tuned(remember(pruned, base.reference, base.sha256), "dsee"), tmp_path / "cut.safetensors")
    other = compress("delta", "diff", file, cut)[1]
    assert "no cosine for 4 places: pruned in two ways (or one of them not at all)" in other
    assert all(row["reason"] and row["cosine"] is None for row in json.loads(compress("delta", "diff", file, cut, "--json")[1]))
    fresh = build(base.folder, ["bad", "good"])
    methods.apply(fresh, "lora", OPTIONS)
    still = compress("delta", "diff", file, write(base, fresh, tmp_path / "fresh.safetensors"))[1]
    assert "no cosine for 4 places: B changes nothing there" in still


def test_a_table_cuts_no_name_on_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    names = [f"bert.encoder.layer.{number}.attention.self.{word}.weight" for number in (0, 1) for word in ("query", "value")]
    table(("place",), [(name,) for name in names])
    shown = "".join(capsys.readouterr().out.split())
    assert all(name in shown for name in names) and "…" not in shown


def test_convert_between_all_forms(compress, base, tmp_path):
    model = task(base, "lora")
    state, delta, adapter, back = (tmp_path / name for name in ("state", "a.safetensors", "adapter", "b.safetensors"))
    save_state(model, state, base=base.reference, base_sha256=base.sha256, label_names=["bad", "good"])
    assert compress("delta", "convert", state, delta)[:2] == (0, f"delta: {delta}\n")
    assert compress("delta", "convert", delta, adapter, "--to", "peft")[:2] == (0, f"LORA: {adapter}\n")
    assert compress("delta", "convert", adapter, back, "--labels", "bad,good")[:2] == (0, f"delta: {back}\n")
    for path in (delta, back):
        assert torch.allclose(logits(compressor.load(delta=path)), logits(model), atol=1e-5)
        assert delta_file.read(path).labels == ["bad", "good"]
    comma = tmp_path / "comma.safetensors"
    assert compress("delta", "convert", adapter, comma, "--labels", '"bad, really",good')[0] == 0
    assert delta_file.read(comma).labels == ["bad, really", "good"]
    bare = tmp_path / "bare.safetensors"
    assert compress("delta", "convert", delta, bare, "--no-head")[1] == f"delta: {bare} (without a task head)\n"
    assert delta_file.read(bare).head is None
    assert compress("delta", "convert", bare, tmp_path / "c.safetensors")[1].endswith("(without a task head)\n")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("architecture", "auto_class"), [("gpt2", GENERATES), ("t5", TEXT2TEXT)], ids=["decoder", "encoder and decoder"]
)
def test_a_model_that_generates_keeps_its_class_through_peft(compress, tmp_path, architecture, auto_class):
    """It has no task head that could be missing."""
    peft = pytest.importorskip("peft")
    base = resolve(str(write_model(tmp_path / "base", architecture, auto=auto_class)))
    model = tuned(build(base.folder, [], auto_class=auto_class), "lora")
    source, adapter, back = (tmp_path / name for name in ("source", "adapter", "back"))
    delta_file.write(model, source, base=base.reference, base_sha256=base.sha256, label_names=[])
    assert compress("delta", "convert", source, adapter, "--to", "peft")[:2] == (0, f"LORA: {adapter}\n")
    assert compress("delta", "convert", adapter, back)[:2] == (0, f"delta: {back}\n")
    assert delta_file.read(back).head == delta_file.read(source).head == {}
    again, rows = tmp_path / "again", {"input_ids": torch.tensor([[2, 5, 9, 3]])}
    assert compress("delta", "convert", back, again, "--to", "peft")[:2] == (0, f"LORA: {again}\n")
    bare = tmp_path / "bare"
    assert compress("delta", "convert", source, bare, "--to", "peft", "--no-head")[0] == 0
    rows |= {"decoder_input_ids": torch.tensor([[0, 8, 9]])} if auto_class == TEXT2TEXT else {}
    opens = getattr(peft, auto_class.replace("AutoModel", "AutoPeftModel"))
    for found in (compressor.load(delta=back), opens.from_pretrained(again).eval(), opens.from_pretrained(bare).eval()):
        with torch.no_grad():
            assert torch.allclose(found(**rows).logits, model(**rows).logits, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("auto_class", [TOKENS, GENERATES])
def test_an_adapter_without_a_task_type_keeps_its_class(compress, tmp_path, auto_class):
    """peft then names the class of the model alone."""
    peft = pytest.importorskip("peft")
    architecture, labels = ("bert", ["no", "name"]) if auto_class == TOKENS else ("gpt2", [])
    base = resolve(str(write_model(tmp_path / "base", architecture, auto=auto_class)))
    options = {"target_modules": ["query"], "modules_to_save": ["classifier"]} if labels else {"target_modules": ["c_attn"]}
    config = peft.LoraConfig(r=2, init_lora_weights=False, **options)
    theirs = peft.get_peft_model(build(base.folder, labels, auto_class=auto_class), config).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    given = ("--labels", "no,name") if labels else ()
    code, shown, _ = compress("delta", "convert", tmp_path / "adapter", tmp_path / "x", "--base", base.folder, *given)
    assert (code, shown, delta_file.read(tmp_path / "x").auto_class) == (0, f"delta: {tmp_path / 'x'}\n", auto_class)
    assert torch.allclose(logits(compressor.load(delta=tmp_path / "x")), logits(theirs), atol=1e-6)


def test_peft_does_not_hold_the_kind_of_task(compress, base, tmp_path):
    source, adapter = tmp_path / "source", tmp_path / "adapter"
    facts = {"base": base.reference, "base_sha256": base.sha256, "label_names": ["bad", "good"], "kind": "multilabel"}
    delta_file.write(task(base, "lora"), source, **facts)
    code, _, told = compress("delta", "convert", source, adapter, "--to", "peft")
    assert code == 0 and "peft stores no kind of task, and this is multilabel: convert it back with --kind multilabel\n" in told
    for kind, recorded in (((), ""), (("--kind", "multilabel"), "multilabel"), (("--kind", "classification"), "")):
        back = tmp_path / f"back{''.join(kind)}"
        assert compress("delta", "convert", adapter, back, "--labels", "bad,good", *kind)[0] == 0
        assert delta_file.read(back).kind == recorded
    assert compressor.load(delta=tmp_path / "back--kindmultilabel").config.problem_type == "multi_label_classification"
    assert "peft stores" not in compress("delta", "convert", tmp_path / "back", tmp_path / "again", "--to", "peft")[2]


def test_super_tuning_out_and_in(compress, file, tmp_path):
    adapter, back = tmp_path / "adapter", tmp_path / "back.safetensors"
    assert compress("delta", "convert", file, adapter, "--to", "peft")[:2] == (0, f"SUPERTUNING: {adapter}\n")
    assert compress("delta", "convert", adapter, back, "--labels", "bad,good")[:2] == (0, f"delta: {back}\n")
    assert torch.allclose(logits(compressor.load(delta=back)), logits(compressor.load(delta=file)), atol=1e-6)
    rows = json.loads(compress("delta", "diff", file, back, "--json")[1])
    assert all(row["jaccard"] == 1 and row["cosine"] == pytest.approx(1) for row in rows)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["lora", "dsee"])
def test_stock_peft_finds_the_base_of_a_converted_adapter(compress, tmp_path, monkeypatch, method):
    """Also where we know it as package:NAME/PATH, or by a folder from here, which transformers would take for hub ids."""
    peft = pytest.importorskip("peft")
    write_model(tmp_path / "some_package" / "model")
    (tmp_path / "some_package" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for reference in ("package:some_package/model", "some_package/model"):
        base, name = resolve(reference), reference.replace("/", "-").replace(":", "-")
        model = task(base, method)
        source, adapter = write(base, model, tmp_path / f"{name}.safetensors"), tmp_path / name
        code, shown, told = compress("delta", "convert", source, adapter, "--to", "peft")
        assert code == 0 and shown.endswith(f": {adapter}\n")
        folder = tmp_path / "some_package" / "model"
        assert f"is {folder}: elsewhere" in told and str(adapter / CONFIG) in told
        monkeypatch.chdir(tmp_path.parent)
        theirs = peft.AutoPeftModelForSequenceClassification.from_pretrained(adapter).eval()
        monkeypatch.chdir(tmp_path)
        assert torch.allclose(logits(theirs), logits(model), atol=1e-6)
        bare = tmp_path / f"{name}-bare"
        assert compress("delta", "convert", source, bare, "--to", "peft", "--no-head")[0] == 0
        theirs = peft.AutoPeftModel.from_pretrained(bare).eval()
        with torch.no_grad():
            theirs.base_model.model.classifier.load_state_dict(model.classifier.state_dict())
        assert torch.allclose(logits(theirs), logits(model), atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_stock_peft_opens_an_adapter_on_a_classifier_of_other_labels(compress, tmp_path):
    """As docs/deltas.md says: transformers refuses the base's own task head otherwise."""
    peft = pytest.importorskip("peft")
    base = resolve(str(write_model(tmp_path / "base", auto="AutoModelForSequenceClassification")))
    labels, source, adapter = ["bad", "fair", "good"], tmp_path / "source", tmp_path / "adapter"
    model = tuned(build(base.folder, labels), "lora")
    delta_file.write(model, source, base=base.reference, base_sha256=base.sha256, label_names=labels)
    assert compress("delta", "convert", source, adapter, "--to", "peft")[0] == 0
    opens = peft.AutoPeftModelForSequenceClassification.from_pretrained
    theirs = opens(adapter, num_labels=3, ignore_mismatched_sizes=True).eval()
    assert torch.allclose(logits(theirs), logits(model), atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_without_a_task_head_has_the_labels_of_the_base_that_answers(compress, tmp_path):
    peft = pytest.importorskip("peft")
    names = {"id2label": {0: "NEG", 1: "POS", 2: "NONE"}, "label2id": {"NEG": 0, "POS": 1, "NONE": 2}}
    base = write_model(tmp_path / "base", auto="AutoModelForSequenceClassification", **names)
    config = peft.LoraConfig(r=2, target_modules=["query"], init_lora_weights=False)
    theirs = peft.get_peft_model(AutoModelForSequenceClassification.from_pretrained(base), config).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    out = tmp_path / "out"
    shown = f"delta: {out} (without a task head)\n"
    assert compress("delta", "convert", tmp_path / "adapter", out)[:2] == (0, shown)
    assert delta_file.read(out).labels == ["NEG", "POS", "NONE"]
    assert torch.allclose(logits(compressor.load(delta=out)), logits(theirs), atol=1e-6)
    several, merged = tmp_path / "several", tmp_path / "merged"
    assert compress("delta", "convert", tmp_path / "adapter", several, "--kind", "multilabel")[0] == 0
    assert compress("delta", "apply", several, "--out", merged)[0] == 0
    live = compressor.load(delta=several)
    for config in (live.config, AutoConfig.from_pretrained(merged)):
        assert config.problem_type == "multi_label_classification"
    assert compressor.load(live, delta=out).config.problem_type is None


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_of_a_masked_language_model_is_read_with_the_rest_of_its_head(compress, tmp_path):
    peft = pytest.importorskip("peft")
    base = write_model(tmp_path / "base", "modernbert", auto="AutoModelForMaskedLM")
    config = peft.LoraConfig(r=2, target_modules=["Wqkv"], task_type="SEQ_CLS", init_lora_weights=False)
    theirs = peft.get_peft_model(AutoModelForSequenceClassification.from_pretrained(base, num_labels=3), config).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    assert compress("delta", "convert", tmp_path / "adapter", tmp_path / "out", "--labels", "a,b,c")[0] == 0
    assert torch.allclose(logits(compressor.load(delta=tmp_path / "out")), logits(theirs), atol=1e-6)


@pytest.mark.parametrize(("form", "code"), [("delta", "E312"), ("peft", "E314")])
def test_what_was_fully_tuned_is_told_as_that(compress, base, tmp_path, form, code):
    """Not as a live model, which nobody gave."""
    facts = {"base": base.reference, "base_sha256": base.sha256, "label_names": ["bad", "good"]}
    save_state(task(base, "full"), tmp_path / "state", **facts)
    assert (tmp_path / "state" / "weights.safetensors").is_file()
    found, _, error = compress("delta", "convert", tmp_path / "state", tmp_path / "x", "--to", form)
    line = error.splitlines()[-1]
    assert found == 2 and line.startswith(code) and "full tuning or a merge changed" in line
    assert not (tmp_path / "x").exists()


def test_a_base_that_is_not_here_is_told_with_the_file_that_names_it(compress, base, tmp_path):
    """By a path that was written in another folder, in a pipeline's file; nobody gave it to the command."""
    facts = {"base": "./nowhere", "base_sha256": base.sha256, "label_names": ["bad", "good"]}
    delta_file.write(task(base, "lora"), tmp_path / "delta", **facts)
    where = f"E303 {tmp_path / 'delta'}: the base that it names is not here"
    says = f"{where}: model './nowhere': no such folder. Give the base: --base, or load"
    for command in (("apply", tmp_path / "delta", "--out", tmp_path / "x"), ("convert", tmp_path / "delta", tmp_path / "x")):
        code, _, error = compress("delta", *command)
        assert code == 2 and error.splitlines()[-1].startswith(says)
    given = compress("delta", "apply", tmp_path / "delta", "--base", "./nowhere", "--out", tmp_path / "x")[2]
    assert given.splitlines()[-1].startswith("E303 model './nowhere': no such folder")
    assert compress("delta", "apply", tmp_path / "delta", "--base", base.folder, "--out", tmp_path / "x")[0] == 0


@pytest.mark.parametrize(("architecture", "method"), [("bert", "adapter"), ("gpt2", "dsee")])
def test_nothing_is_told_of_a_peft_folder_that_is_not_made(compress, tmp_path, capfd, architecture, method):
    base = resolve(str(write_model(tmp_path / "base", architecture)))
    source = write(base, task(base, method), tmp_path / "source")
    capfd.readouterr()
    code, _, error = compress("delta", "convert", source, tmp_path / "x", "--to", "peft")
    assert (code, error[:4], error.count("\n"), (tmp_path / "x").exists()) == (2, "E314", 1, False)


def test_a_hub_id_stays_what_it_is(tmp_path, monkeypatch, capsys):
    """The hub's cache is written by hand: there is no network here."""
    cached = tmp_path / "models--owner--base" / "snapshots" / ("0" * 40)
    write_model(cached)
    (tmp_path / "models--owner--base" / "refs").mkdir()
    (tmp_path / "models--owner--base" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert resolve("owner/base").folder == cached
    capsys.readouterr()
    assert _loadable("owner/base", tmp_path) == ("owner/base", "") and capsys.readouterr().err == ""


def test_convert_says_what_it_cannot_take(compress, base, file, tmp_path):
    def refused(code, *arguments):
        found, _, error = compress("delta", "convert", *arguments)
        line = error.splitlines()[-1]  # before it, what the test itself loaded
        assert (found, line[:4]) == (2, code)
        return line

    refused("E315", tmp_path, tmp_path / "x")
    refused("E801", file, file)
    refused("E315", file, tmp_path / "x", "--labels", "a,b")
    assert "--kind is for peft adapters" in refused("E315", file, tmp_path / "x", "--kind", "multilabel")
    refused("E310", base.folder / "model.safetensors", tmp_path / "x")
    adapter = tmp_path / "adapter"
    write_peft(task(base, "lora"), adapter, base=base.reference)
    assert "3 names for 2 classes" in refused("E315", adapter, tmp_path / "x", "--labels", "a,b,c")
    kind = refused("E315", adapter, tmp_path / "x", "--kind", "spans")
    assert "--kind spans is of an AutoModelForTokenClassification, and this adapter of an AutoModelForSeq" in kind
    for labels in ("bad,bad", "bad,", "bad\ngood", '"bad'):
        refused("E315", adapter, tmp_path / "x", "--labels", labels)
    (tmp_path / "empty").mkdir()
    (tmp_path / "nowhere").symlink_to(tmp_path / "x")
    for taken in (tmp_path / "empty", tmp_path / "nowhere", Path("/dev/null")):
        refused("E801", file, taken)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    config = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps({**config, "revision": "v1.0"}))
    assert "revision 'v1.0'" in refused("E315", adapter, tmp_path / "x")
    (adapter / CONFIG).write_text(json.dumps({**config, "base_model_name_or_path": None}))
    assert "--base" in refused("E315", adapter, tmp_path / "x")
    inserted = write(base, task(base, "adapter"), tmp_path / "inserted.safetensors")
    refused("E314", inserted, tmp_path / "x", "--to", "peft")
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_stack(compress, base, file, tmp_path):
    other = write(base, task(base, "lora", seed=1), tmp_path / "other.delta.safetensors")
    out = tmp_path / "many"
    served = ("--repository", tmp_path / "repository", "--name", "tiny")
    code, shown, _ = compress("delta", "stack", file, other, "--base", base.folder, "--out", out, *served)
    assert code == 0 and "0 dsee" in shown and "1 other" in shown and "token_type_ids, task (int64)" in shown
    assert (tmp_path / "repository" / "tiny-text" / "1" / "serving.json").is_file()
    assert {path.name for path in out.iterdir()} >= {"model.onnx", "export.json", "tokenizer.json", "config.json"}
    facts = json.loads((out / "export.json").read_text())
    assert [(row["name"], row["labels"]) for row in facts["tasks"]] == [("dsee", ["bad", "good"]), ("other", ["bad", "good"])]
    assert compress("delta", "stack", file, "--out", out)[2].splitlines()[-1][:4] == "E620"
    more = write(base, task(base, "lora", seed=2), tmp_path / "more.safetensors")
    again = ("delta", "stack", file, other, more, "--base", base.folder, "--out", out, *served)
    assert compress(*again)[2].splitlines()[-1][:4] == "E620"
    code, shown, _ = compress(*again, "--force")
    assert code == 0 and "2 more" in shown and str(Path("tiny-text", "2")) in shown
    versions = {
        path.parent.name: json.loads(path.read_text()) for path in out.parent.glob("repository/tiny-text/*/serving.json")
    }
    assert {name: [row["name"] for row in facts["tasks"]] for name, facts in versions.items()} == {
        "1": ["dsee", "other"],
        "2": ["dsee", "other", "more"],
    }
    code, _, error = compress("delta", "stack", file, file, "--out", tmp_path / "no")
    assert (code, error.splitlines()[-1][:4], (tmp_path / "no").exists()) == (2, "E777", False)
    assert compress("delta", "stack", file, "--out", tmp_path / "no", "--max-length", 9)[2].startswith("E112 --max-length")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--name", "x-text"), "E720 'x-text' ends as the names of models that take texts do"),
        (("--name", "a model"), "E720 'a model' is not a model name"),
        (("--max-length", 100), "E113 max_length: 100 tokens, where the model has positions for 64"),
        (("--repository", "dsee.safetensors"), "E801 dsee.safetensors: a file, where a folder is needed"),
    ],
)
def test_what_a_repository_refuses_is_told_before_the_file_is_made(compress, file, tmp_path, monkeypatch, options, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stack_work, "stack_folder", lambda *_, **__: pytest.fail("it takes long"))
    code, _, error = compress("delta", "stack", file, "--out", "many", "--repository", "served", *options)
    assert code == 2 and error.splitlines()[-1].startswith(says.replace("E801 ", f"E801 {tmp_path}/"))
    assert not (tmp_path / "many").exists() and not (tmp_path / "served").exists()
