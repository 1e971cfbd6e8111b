"""The backends' code without a server: what is computed, what is not, and which settings are refused."""

import gc
import importlib
import json
import math
import shutil
import sys
import threading
import weakref
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
from triton_parts import FACTS, LABELS, TRITON, WORDS, write_classifier

from compressor.control_groups import cpu_quota
from compressor.tasks import GENERATED, KINDS
from export.runtimes.runtime_registry import RUNTIMES
from pipelines.stages.served_checks import ANSWERS
from serving.backend_files import backend_names, copy_backend
from serving.clients.by_text import READERS
from serving.clients.by_tokens import load_tokenizer
from serving.front.triton_models import TextModel
from serving.layout.text_outputs import ANY_KIND, CLASSES, TEXT_OUTPUTS
from serving.layout.version_file import read_version
from serving.repository import write_version
from tests.compressor.test_processor import write_groups


class Request(SimpleNamespace):
    """One that can be referred to weakly."""


def request(cancelled=False, **arrays):
    def as_numpy(array):
        if array is None:
            raise RuntimeError("the tensor cannot be read")
        return array

    tensors = {name: SimpleNamespace(as_numpy=lambda array=array: as_numpy(array)) for name, array in arrays.items()}
    return Request(tensors=tensors, is_cancelled=lambda: cancelled)


def tokens(ids, mask=None):
    ids = np.array(ids)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids) if mask is None else np.array(mask)}


@pytest.fixture
def served(tmp_path, tokenizer_folder):
    """Triton's arguments for the tiny classifier."""
    write_version(tmp_path / "m" / "1", write_classifier(tmp_path / "m.onnx"), RUNTIMES["onnxruntime"], FACTS, tokenizer_folder)

    def arguments(names, type_, outputs, parameters=(), **config):
        config = {
            "max_batch_size": 8,
            "input": [{"name": name, "data_type": type_} for name in names],
            "output": [{"name": name, "data_type": "TYPE_FP32"} for name in outputs],
            "instance_group": [{"count": 1}],
            "parameters": {key: {"string_value": value} for key, value in dict(parameters).items()},
            **config,
        }
        place = {"model_repository": str(tmp_path / "m"), "model_version": "1"}
        return {"model_config": json.dumps(config), "model_instance_kind": "CPU", **place}

    return arguments


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("place", ["tokenizer_config.json", "tokenizer.json"])
def test_long_texts_are_cut_at_the_end_at_which_they_were_in_training(modules, tokenizer_folder, tmp_path, side, place):
    from transformers import AutoTokenizer

    folder = shutil.copytree(tokenizer_folder, tmp_path / "tokenizers")
    settings = {"truncation_side": side} if place == "tokenizer_config.json" else {
        "truncation": {"direction": side.capitalize(), "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    }  # fmt: skip
    (folder / place).write_text(json.dumps({**json.loads((folder / place).read_text()), **settings}))
    write_version(tmp_path / "m" / "1", write_classifier(tmp_path / "m.onnx"), RUNTIMES["onnxruntime"], FACTS, folder)
    text = "a great film " * 200 + "the plot was dull"
    expected = AutoTokenizer.from_pretrained(folder)(text, truncation=True, max_length=FACTS.max_length).input_ids
    facts = read_version(tmp_path / "m" / "1")
    assert load_tokenizer(tmp_path / "m" / "1" / "tokenizer", facts).encode(text).ids == expected
    text_rows = modules("compress_text", "text_rows")
    model = text_rows.TextModel(tmp_path / "m" / "1", asdict(facts), SimpleNamespace(streams=1), {"input_ids": np.int64}, None)
    (row,) = rows = [model.row([text.encode()])]
    assert model.tokenize(rows) == {} and row.encoding.ids == expected
    assert len(model.shortened(text)) < len(text) if side == "right" else model.shortened(text) == text


def test_every_kind_that_writes_no_texts_can_be_served(modules):
    """One without a row would fail where it is deployed, or where the first client asks."""
    kinds = set(KINDS) - set(GENERATED)
    assert set(modules("compress_text", "text_answers").FORMATS) == set(TEXT_OUTPUTS) == {*kinds, ANY_KIND}
    assert set(ANSWERS) == kinds
    values = {"TYPE_STRING": np.array(b"[]", object), "TYPE_FP32": np.float32(1), "TYPE_INT64": np.int64(1)}
    for kind, outputs in TEXT_OUTPUTS.items():
        row = {name: np.full(2 if count == CLASSES else count, values[type_]) for name, type_, count in outputs}
        (read,) = [read for output, read in READERS.items() if output in row]
        assert read("a", row) is not None, kind
        front = TextModel("a-text", pairs=False, most=1, outputs=tuple(row))
        (found,) = front.predictions({name: array[None] for name, array in row.items()})
        assert found.model_dump(exclude_none=True), kind


def counted(model):
    """The model, with the batch sizes of its runs."""
    infer, sizes = model.engine.infer, []
    model.engine.infer = lambda names, feeds: (sizes.append(len(feeds["input_ids"])), infer(names, feeds))[1]
    return sizes


def start(module, arguments):
    model = module.TritonPythonModel()
    model.initialize(arguments)
    return model, counted(model)


def test_wrong_requests_cost_no_computation_and_no_neighbour(modules, served):
    inputs = ("input_ids", "attention_mask")
    model, sizes = start(modules("onnxruntime", "model"), served(inputs, "TYPE_INT64", ["logits"]))
    good = tokens([[2, 4, 3]])
    responses = model.execute(
        [
            request(**good),
            request(**tokens([[2, 99, 3]])),
            request(**tokens([[1] * 20_000])),
            request(True, **good),
            request(**{**good, "attention_mask": None}),
            request(**tokens([[2, 4, 3], [2, 5, 3]])),
        ]
    )
    codes = [response.error and response.error.code for response in responses]
    assert codes == [None, "INVALID_ARG", "INVALID_ARG", "CANCELLED", "INTERNAL", None]
    assert sizes == [3], "one run with the rows of the good requests"
    assert [len(responses[number].tensors["logits"]) for number in (0, 5)] == [1, 2]


def test_wrong_rows_never_compile_an_openvino_model_again(modules, served, tmp_path):
    """A failed inference breaks the compiled model: it would be compiled again, for seconds, while others wait."""
    openvino = pytest.importorskip("openvino", reason="the extra openvino is not installed")
    arguments = served(("input_ids", "attention_mask"), "TYPE_INT64", ["logits"])
    openvino.save_model(openvino.Core().read_model(tmp_path / "m.onnx"), tmp_path / "m" / "1" / "model.xml")
    model, sizes = start(modules("openvino", "model"), arguments)
    compiled = model.engine.model.compiled
    wrong = [tokens([[1] * 65]), tokens([[99]]), tokens([[1, 1]], [[1]]), tokens([[-1]])]
    # 63 and 64 tokens: padding stays within the model's positions
    right = [tokens([[1] * length]) for length in (63, 64, 3)]
    responses = model.execute([request(**feed) for feed in (*wrong, *right)])
    assert [bool(response.error) for response in responses] == [True] * 4 + [False] * 3
    assert len(sizes) == 3 and model.engine.model.compiled is compiled
    assert model.engine.model.shortest_failed == 65


def test_texts_run_in_sub_batches_of_similar_length(modules, served):
    arguments = served(["TEXT"], "TYPE_STRING", ["LABEL"], {"max_batch_tokens": "12"})
    model, sizes = start(modules("compress_text", "model"), arguments)
    rows = [b"a", b"a a a a a a a a a", b"film film", b"great"]
    requests = [request(TEXT=np.array([[row]], dtype=object)) for row in rows]
    requests += [request(TEXT=np.array([[b"a"], [b"\xff"]], dtype=object)), request(TEXT=None)]
    responses = model.execute(requests)
    codes = [response.error and response.error.code for response in responses]
    assert codes == [None] * 4 + ["INVALID_ARG", "INTERNAL"]
    assert sizes == [1, 3], "8 tokens alone; 4, 3 and 3 tokens together"
    alone = [model.execute([one])[0].tensors for one in requests[:4]]
    for response, single in zip(responses, alone, strict=False):
        assert response.tensors["LABEL"] == single["LABEL"] and response.tensors["LABEL"].item().decode() in LABELS
        np.testing.assert_allclose(response.tensors["SCORES"], single["SCORES"], atol=1e-6)


def test_cancelled_texts_cost_no_computation_in_a_full_batch(modules, served):
    """Whether a request is cancelled takes 0.1 ms to ask: more than is saved where nothing waits."""
    model, sizes = start(modules("compress_text", "model"), served(["TEXT"], "TYPE_STRING", ["LABEL"]))
    one = {"TEXT": np.array([[b"a"]], dtype=object)}
    requests = [request(True, **one), *(request(**one) for _ in range(7))]
    codes = [response.error and response.error.code for response in model.execute(requests)]
    assert codes == ["CANCELLED", *[None] * 7] and sizes == [7]
    assert [response.error for response in model.execute(requests[:7])] == [None] * 7


def test_sub_batches_are_computed_at_the_same_time(modules, served):
    """Two threads are two streams: each run waits for the other, and a failed one fails alone."""
    parameters = {"max_batch_tokens": "12", "streams": "0", "intra_op_thread_count": "2"}
    model, _ = start(modules("compress_text", "model"), served(["TEXT"], "TYPE_STRING", ["LABEL"], parameters))
    rows = [b"a", b"a a a a a a a a a", b"film film", b"great"]
    requests = [request(TEXT=np.array([[row]], dtype=object)) for row in rows]
    alone = [model.execute([one])[0].tensors["SCORES"] for one in requests]
    infer, together = model.engine.infer, threading.Barrier(2, timeout=60)

    def meet(names, feeds):
        together.wait()
        if feeds["input_ids"].shape[1] > 7:
            raise RuntimeError("no memory")
        return infer(names, feeds)

    model.engine.infer = meet
    responses = model.execute(requests)
    assert [bool(response.error) for response in responses] == [False, True, False, False]
    for response, single in zip(responses, alone, strict=True):
        if not response.error:
            np.testing.assert_allclose(response.tensors["SCORES"], single, atol=1e-6)


def test_sub_batches_give_each_stream_its_share(modules, served):
    modules("compress_text", "model")
    sub_batches = importlib.import_module("sub_batches").sub_batches
    lengths = [5, 9, 5, 5]
    assert sub_batches(lengths, 512) == [[1, 0, 2, 3]]
    assert sub_batches(lengths, 512, 2) == [[1], [0, 2, 3]]
    assert sub_batches(lengths, 12, 2) == [[1], [0], [2], [3]], "three would leave one stream idle"
    assert sub_batches([7], 4, 3) == [[0]] and sub_batches([], 4, 3) == []


def test_no_more_of_a_text_is_tokenized_than_the_model_can_read(modules, served):
    """A megabyte takes a second: 8 tokens are read here. The answer is that of the whole text."""
    model, _ = start(modules("compress_text", "model"), served(["TEXT"], "TYPE_STRING", ["LABEL"]))
    encode, lengths = model.model.encode_batch, []
    model.model.encode_batch = lambda texts: (lengths.extend(map(len, texts)), encode(texts))[1]
    # the second makes too few tokens at its beginning, the third has no space there
    texts = ["the film was great " * 50_000, "x" * 300 + " the film was great" * 50, "y" * 900 + " film", "a " * 9]
    found = [model.execute([request(TEXT=np.array([[text.encode()]], dtype=object))])[0] for text in texts]
    assert lengths[0] < 300 and lengths[1:] == [len(text) for text in texts[1:]]
    model.model.shortened = lambda text, other="": text
    for text, response in zip(texts, found, strict=True):
        whole = model.execute([request(TEXT=np.array([[text.encode()]], dtype=object))])[0]
        np.testing.assert_array_equal(response.tensors["SCORES"], whole.tensors["SCORES"])


@pytest.mark.parametrize(
    ("first", "second", "shorter"),
    [
        ("great " * 500, "a " * 490, False),  # the first has more tokens, but fewer in as many characters
        ("a " * 60, f"{'great' * 6} " * 100, False),
        ("film", "great " * 500, True),
        ("great " * 500, "film", True),
    ],
)
def test_a_pair_of_long_texts_is_cut_as_in_training(modules, served, tmp_path, first, second, shorter):
    """Of 5 tokens that are read the longer text has 3."""
    served((), "", [])
    text_rows, version = modules("compress_text", "text_rows"), tmp_path / "m" / "1"
    facts = asdict(read_version(version)) | {"pair": True}
    model = text_rows.TextModel(version, facts, SimpleNamespace(streams=1), {"input_ids": np.int64}, None)
    encode, given = model.encode_batch, []
    model.encode_batch = lambda pairs: (given.extend(pairs), encode(pairs))[1]
    (row,) = rows = [model.row([first.encode(), second.encode()])]
    assert model.tokenize(rows) == {} and row.encoding.ids == model.tokenizer.encode(first, second).ids
    assert (given != [(first, second)]) is shorter


def test_a_text_whose_marks_are_cut_off_is_refused(modules, served, tmp_path):
    """8 tokens are read, the first and the last of which are special."""
    arguments, facts = served(["TEXT"], "TYPE_STRING", ["LABEL"]), tmp_path / "m" / "1" / "serving.json"
    facts.write_text(json.dumps({**json.loads(facts.read_bytes()), "task": "marked"}))
    model, sizes = start(modules("compress_text", "model"), arguments)
    texts = ["a [ film ] was great a b", "a b a b a [ film ]", "a b a b a b a b a b", "[ film ] was { great }"]
    found = model.execute([request(TEXT=np.array([[text.encode()]], dtype=object)) for text in texts])
    codes = [response.error and response.error.code for response in found]
    assert codes == [None, "INVALID_ARG", None, "INVALID_ARG"] and sum(sizes) == 2
    assert "the marked spans lie behind what the model reads" in str(found[1].error)


def test_a_failure_of_the_runtime_is_only_of_its_rows(modules, served):
    arguments = served(["TEXT"], "TYPE_STRING", ["LABEL"], {"max_batch_tokens": "8"})
    model, _ = start(modules("compress_text", "model"), arguments)
    infer = model.engine.infer

    def fail_on_long_rows(names, feeds):
        if feeds["input_ids"].shape[1] > 7:
            raise RuntimeError("no memory")
        return infer(names, feeds)

    model.engine.infer = fail_on_long_rows
    long, short = (request(TEXT=np.array([[text]], dtype=object)) for text in (b"a " * 9, b"a"))
    responses = model.execute([long, short])
    assert responses[0].error.code == "INTERNAL" and "onnx runtime error: no memory" in str(responses[0].error)
    assert responses[1].error is None


PAIRS = {"pair": True}
TASKS = {"labels": [], "tasks": [{"name": "one", "labels": ["x", "y"], "kind": "classification"}]}


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("kind", "facts", "outputs", "unread"),
    [
        ("classification", {}, 3, None),
        ("marked", {}, 3, None),
        ("regression", {}, 1, None),
        ("multilabel", {}, 3, None),
        ("choices", PAIRS, 1, None),
        ("tokens", {}, 3, np.s_[:, 0]),  # of the token before the words
        ("spans", PAIRS, 2, np.s_[:, 1]),  # of the question
        ("tasks", TASKS, 3, np.s_[:, 2]),  # beyond the outputs of the task
    ],
)
def test_a_row_whose_numbers_are_not_finite_has_an_error_for_an_answer(
    modules, served, tmp_path, kind, facts, outputs, unread, number
):
    """Not a label, which would be the first one; those of other rows, and what no answer reads, are no reason."""
    names = ["TEXT", *(["PAIR"] if facts is PAIRS else []), *(["TASK"] if facts is TASKS else [])]
    arguments, path = served(names, "TYPE_STRING", ["LABEL"]), tmp_path / "m" / "1" / "serving.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "task": kind, **facts}))
    model, _ = start(modules("compress_text", "model"), arguments)

    def infer(_names, feeds):
        logits = np.zeros((*feeds["input_ids"].shape, outputs), np.float32)
        logits = logits if kind in ("tokens", "spans") else logits[:, 0]
        if unread is not None:
            logits[unread] = number
        logits[(feeds["input_ids"] == WORDS.index("dull")).any(axis=1)] = number
        return [logits]

    model.engine.infer = infer

    def asked(*texts):
        given = {"TEXT": texts, "PAIR": ["film"] * len(texts), "TASK": ["one"] * len(texts)}
        return request(**{name: np.array([[text.encode()] for text in given[name]], dtype=object) for name in names})

    good, bad, both = model.execute([asked("a"), asked("dull"), asked("a", "dull")])
    assert good.error is None and all(np.isfinite(array).all() for array in good.tensors.values() if array.dtype.kind == "f")
    told = [(response.error.code, str(response.error)) for response in (bad, both)]
    what = "the model's outputs are not finite"
    assert told == [("INTERNAL", f"onnx runtime error: {row}{what}") for row in ("row 0: ", "row 1: ")]


def test_no_request_outlives_its_response(modules, served):
    """Its memory is shared with Triton: a request that errors keep alive crashes the stub at its end."""
    model, _ = start(modules("compress_text", "model"), served(["TEXT"], "TYPE_STRING", ["LABEL"]))
    model.model.format = SimpleNamespace(**vars(model.model.format) | {"check": fail, "written": str, "answer": None})
    gc.disable()
    try:
        for text in (b"a", b"\xff", b"film"):
            one = request(TEXT=np.array([[text]], dtype=object))
            alive = weakref.ref(one)
            assert model.execute([one])[0].error is not None
            del one
            assert alive() is None
            model.model.format.check = lambda row: None  # now the answer fails
    finally:
        gc.enable()


def fail(row):
    raise sys.modules["door"].Refused("no")


def test_a_panic_of_the_tokenizer_is_an_error_of_its_row(modules, served):
    model, _ = start(modules("compress_text", "model"), served(["TEXT"], "TYPE_STRING", ["LABEL"]))
    encode = model.model.encode_batch

    def panic(rows):
        if "odd" in rows:
            raise BaseException("PanicException")
        return encode(rows)

    model.model.encode_batch = panic
    responses = model.execute([request(TEXT=np.array([[text]], dtype=object)) for text in (b"a", b"odd", b"film")])
    assert [response.error and response.error.code for response in responses] == [None, "INTERNAL", None]


ACCELERATED = {"optimization": {"execution_accelerators": {"cpu_execution_accelerator": [{"name": "openvino"}]}}}


@pytest.mark.parametrize(
    ("kind", "parameters", "config", "words"),
    [
        ("CPU", {}, ACCELERATED, "cpu_execution_accelerator 'openvino' is not implemented by this backend"),
        ("GPU", {"gpu_mem_limit": "9"}, {}, "parameter 'gpu_mem_limit' is not implemented by this backend"),
        ("CPU", {}, {"optimization": {"graph": {"level": 7}}}, "graph optimization level 7"),
    ],
)
def test_settings_of_the_native_backend_are_followed_or_refused(modules, served, kind, parameters, config, words):
    arguments = served(("input_ids",), "TYPE_INT64", ["logits"], parameters, **config)
    with pytest.raises(TRITON.TritonModelException, match=words):
        modules("onnxruntime", "model").TritonPythonModel().initialize({**arguments, "model_instance_kind": kind})


def test_an_instance_for_a_gpu_needs_an_onnx_runtime_with_cuda(modules, served, monkeypatch):
    """Also for bf16, which ONNX Runtime would refuse with words about a missing Add: it falls back to the CPU."""
    model = modules("onnxruntime", "model").TritonPythonModel()
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CPUExecutionProvider"])
    arguments = served(("input_ids",), "TYPE_INT64", ["logits"], {}) | {"model_instance_kind": "GPU"}
    with pytest.raises(TRITON.TritonModelException, match=r"the server's ONNX Runtime [\d.]+ in \S+ has no CUDA"):
        model.initialize({**arguments, "model_instance_device_id": "0"})


def test_memory_settings_of_the_native_backend_are_followed(modules, served):
    settings = {"enable_mem_arena": "0", "enable_mem_pattern": "0", "intra_op_thread_count": "3"}
    modules("onnxruntime", "model")
    options = importlib.import_module("onnxruntime_engine").session_options({}, settings, 3)
    assert (options.enable_cpu_mem_arena, options.enable_mem_pattern, options.intra_op_num_threads) == (False, False, 3)


def test_instances_share_the_cores(modules, tmp_path, monkeypatch):
    modules("onnxruntime", "model")
    threads, groups = map(importlib.import_module, ("cpu_threads", "control_groups"))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    for quota, cores in (("250000 100000\n", 3), ("max 100000\n", 8), ("damaged\n", 8)):
        (tmp_path / "cpu.max").write_text(quota)
        assert groups.cores(tmp_path, tmp_path / "membership") == cores
    monkeypatch.setattr(groups, "cpu_quota", lambda *_: None)
    assert [threads.threads_of({"instance_group": [{"count": n}]}, {}, "t") for n in (1, 2, 3, 20)] == [8, 4, 2, 1]
    assert threads.threads_of({"instance_group": [{"count": 2}]}, {"t": "5"}, "t") == 5


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        ("0::/pod/box\n", {"pod/box/cpu.max": "200000 100000"}),
        ("0::/pod/box\n", {"pod/cpu.max": "150000 100000", "pod/box/cpu.max": "max 100000"}),
        (
            "4:cpu,cpuacct:/box\n0::/\n",
            {"cpu,cpuacct/box/cpu.cfs_quota_us": "200000", "cpu,cpuacct/box/cpu.cfs_period_us": "100000"},
        ),
        (
            "4:cpu:/box/inner\n",
            {
                "cpu/cpu.cfs_quota_us": "200000",
                "cpu/cpu.cfs_period_us": "100000",
                "cpu/box/inner/cpu.cfs_quota_us": "-1",
                "cpu/box/inner/cpu.cfs_period_us": "100000",
            },
        ),
    ],
    ids=["own", "parent", "version 1", "parent of version 1"],
)
def test_every_control_group_of_a_server_limits_its_threads(modules, tmp_path, monkeypatch, membership, files):
    """As the pipeline counts cores (`compressor.processor`): more threads than the quota allows delay each other."""
    modules("onnxruntime", "model")
    groups = importlib.import_module("control_groups")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    paths = write_groups(tmp_path, membership, files)
    assert groups.cores(*paths) == 2 == math.ceil(cpu_quota(*paths))


def test_the_backends_import_nothing_of_the_project(tmp_path):
    """What a production server needs is in the folder that is mounted there."""
    names = {"serving", "export", "compressor", "pipelines", "torch", "transformers"}
    for backend in backend_names():
        for path in copy_backend(backend, tmp_path).glob("*.py"):
            lines = [line.split() for line in path.read_text().splitlines()]
            imported = {words[1].split(".")[0] for words in lines if len(words) > 1 and words[0] in ("import", "from")}
            assert not imported & names, path


class Rows(SimpleNamespace):
    """A batch whose tokens are given."""

    def join(self, row, ids):
        self.rows.append(row)
        return ids[0]

    def step(self):
        return [0] * len(self.rows)

    def leave(self, gone):
        self.rows = [row for number, row in enumerate(self.rows) if number not in gone]


def test_a_text_that_fails_ends_its_request_alone(modules):
    """The thread that generates serves all requests: what ends it would leave every later one without an answer."""
    module = modules("compress_generate", "model")
    sent = {"bad": [], "good": []}

    def stream(name, texts):
        sender = SimpleNamespace(send=lambda response, flags: sent[name].append((response, flags)), is_cancelled=lambda: False)
        text = SimpleNamespace(add=lambda token: texts.pop(0).encode().decode(), finish="", tokens=0)
        return module.Stream(sender, [0], text, None, True)

    model = module.TritonPythonModel()
    model.batch = Rows(rows=[])
    model.join(stream("good", ["a", "b", "c"]))
    model.join(stream("bad", ["a", "\ud800"]))
    model.step()
    model.join(stream("bad", ["\ud800"]))
    model.step()
    assert [bool(response.error) for response, _ in sent["good"]] == [False] * 3
    assert [(bool(response.error), flags) for response, flags in sent["bad"]] == [(False, 0), (True, 1), (True, 1)]
    assert len(model.batch.rows) == 1
