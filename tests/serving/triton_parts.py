"""A tiny classifier and its tokenizer, written in a moment, and a look at the processes of a server."""

import contextlib
import json
import shutil
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from compressor.errors import UserError
from serving.deployment.answers import Answer, tensor
from serving.deployment.triton_control import Refused
from serving.layout.knobs import Knobs
from serving.layout.version_file import VersionFacts
from serving.repository import read_config, write_config, write_repository
from serving.server import EmbeddedServer

NAME = "reviews"
LABELS = ("bad", "fair", "good")
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "dull", "film", "fine", "great", "plot", "the", "was")

POSITIONS = 64
FACTS = VersionFacts(
    task="classification",
    labels=LABELS,
    max_length=8,
    pad_id=0,
    vocabulary=len(WORDS),
    positions=POSITIONS,
    precision="fp32",
)
KNOBS = Knobs(instances=1, threads=1, max_batch_size=32)


class TritonError(Exception):
    INVALID_ARG, CANCELLED, INTERNAL = "INVALID_ARG", "CANCELLED", "INTERNAL"

    def __init__(self, message, code):
        super().__init__(message)
        self.code = code


class QuickServer(EmbeddedServer):
    """A server that is killed at its end, when nothing is in flight: Triton takes three seconds to end by itself."""

    def __exit__(self, *_):
        self.stop(0)


TRITON = SimpleNamespace(
    TritonError=TritonError,
    TritonModelException=type("TritonModelException", (Exception,), {}),
    Tensor=lambda name, array: (name, array),
    InferenceResponse=lambda tensors=(), error=None: SimpleNamespace(tensors=dict(tensors), error=error),
    get_input_tensor_by_name=lambda request, name: request.tensors.get(name),
    TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
)
"""What a backend imports from Triton's Python stub, for tests of its code without a server."""


def write_classifier(path, seed=0, large=()):
    """logits (batch, 3) = mean of the unmasked tokens' embeddings, times a weight: a padded batch answers like its rows.
    `large`: words -> the factor of their embeddings."""
    generator = np.random.default_rng(seed)
    constants = {
        "embedding": generator.normal(size=(len(WORDS), 8)).astype(np.float32),
        "weight": generator.normal(size=(8, len(LABELS))).astype(np.float32),
        "last": np.array([2]),
        "second": np.array([1]),
    }
    for word, factor in dict(large).items():
        constants["embedding"][WORDS.index(word)] *= factor
    nodes = [
        ("Gather", ["embedding", "input_ids"], "tokens"),
        ("Cast", ["attention_mask"], "mask"),
        ("Unsqueeze", ["mask", "last"], "mask3"),
        ("Mul", ["tokens", "mask3"], "kept"),
        ("ReduceSum", ["kept", "second"], "sum"),
        ("ReduceSum", ["mask", "second"], "count"),
        ("Div", ["sum", "count"], "mean"),
        ("MatMul", ["mean", "weight"], "logits"),
    ]
    return save_graph(path, nodes, constants, ["batch", len(LABELS)])


def save_graph(path, nodes, constants, shape):
    """Write a graph of (operator, inputs, output) that takes tokens and gives logits of a shape."""
    attributes = {"mask": {"to": TensorProto.FLOAT}, "sum": {"keepdims": 0}, "count": {"keepdims": 1}}
    graph = helper.make_graph(
        [helper.make_node(op, ins, [out], **attributes.get(out, {})) for op, ins, out in nodes],
        "model",
        [helper.make_tensor_value_info(n, TensorProto.INT64, ["batch", "sequence"]) for n in ("input_ids", "attention_mask")],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


def write_tagger(path, *, labels, pooled=False):
    """logits (batch, length, labels), largest at the token's id modulo `labels`; `pooled`: (batch, 1), the mean of the ids."""
    ids = np.arange(len(WORDS))
    table = ids[:, None] if pooled else np.eye(labels)[ids % labels]
    constants = {"table": table.astype(np.float32), "last": np.array([2]), "second": np.array([1])}
    nodes = [
        ("Gather", ["table", "input_ids"], "tokens"),
        ("Cast", ["attention_mask"], "mask"),
        ("Unsqueeze", ["mask", "last"], "mask3"),
        ("Mul", ["tokens", "mask3"], "kept" if pooled else "logits"),
        *([("ReduceSum", ["kept", "second"], "sum"), ("ReduceSum", ["mask", "second"], "count")] if pooled else []),
        *([("Div", ["sum", "count"], "logits")] if pooled else []),
    ]
    return save_graph(path, nodes, constants, ["batch", 1] if pooled else ["batch", "sequence", labels])


def write_tokenizer(folder):
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens(list(WORDS[:4]))
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[PAD]"}))
    (folder / "model.safetensors").write_bytes(b"weights, not a tokenizer file")
    return folder


def write_served(folder, classifier, tokenizer_folder, *, delay_us=5000):
    """A repository of "reviews", which takes tokens and texts, and "bare", of which nothing is known.

    Its batches wait so long that concurrent requests really share one; for tokens that is set as a user would, in the config.
    """
    knobs = replace(KNOBS, max_queue_delay_us=delay_us, max_batch_size=64)
    options = {"facts": FACTS, "tokenizer_folder": tokenizer_folder, "interfaces": ("tokens", "text"), "knobs": knobs}
    model = write_repository(folder, "reviews", classifier, **options)
    config = read_config(model)
    config.dynamic_batching.max_queue_delay_microseconds = delay_us
    write_config(config, model)
    write_repository(folder, "bare", classifier, knobs=Knobs(instances=1, max_batch_size=0))
    return folder


def processes_of(group):
    """Living processes of a process group: their names."""
    alive = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            head, _, rest = path.read_text().rpartition(")")
            state, _, pgid = rest.split()[:3]
            if int(pgid) == group and state != "Z":
                alive.append(head.partition("(")[2])
    return alive


def answers_of(model, rows=4):
    """What the file says of some rows, one at a time."""
    session = onnxruntime.InferenceSession(str(model))
    made = []
    for row in range(rows):
        ids = np.arange(4, 5 + row)[None]
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        logits = session.run(["logits"], feeds)[0]
        inputs = [tensor(name, values, "INT64") for name, values in feeds.items()]
        made.append(Answer(inputs, [tensor("logits", logits, "FP32")]))
    return made


class Clients:
    """Threads that `send` until `over` is set, for as long as the block lasts."""

    def __init__(self, count):
        self.over = threading.Event()
        self.threads = [threading.Thread(target=self.send) for _ in range(count)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        for thread in self.threads:
            thread.join()


class Traffic(Clients):
    """One request again and again, from two clients; how many, and every failure."""

    def __init__(self, control, answer, model=NAME):
        super().__init__(2)
        self.control, self.answer, self.model = control, answer, model
        self.failures, self.requests = [], 0

    def send(self):
        while not self.over.is_set():
            try:
                self.control.infer(self.model, self.answer.inputs)
                self.requests += 1
            except (Refused, UserError) as error:
                self.failures.append(str(error))


class Readiness(Clients):
    """The statuses of a server's readiness, asked for again and again."""

    def __init__(self, control):
        super().__init__(1)
        self.control, self.statuses = control, set()

    def send(self):
        while not self.over.wait(0.01):
            self.statuses.add(ready_status(self.control))


def ready_status(control):
    return control._request("GET", "/v2/health/ready")[0]


def of_pairs(version_folder, folder):
    """A copy of a version's folder that says that its rows are pairs."""
    shutil.copytree(version_folder, folder)
    facts = json.loads((folder / "serving.json").read_text())
    (folder / "serving.json").write_text(json.dumps(facts | {"pair": True}))
    return folder


def self_signed(folder: Path, *options: str) -> tuple[Path, Path]:
    """(certificate, key) of localhost, signed by itself, written to `folder`."""
    paths = folder / "ca.pem", folder / "key.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    subprocess.run([*command, *names, *options, "-out", paths[0], "-keyout", paths[1]], check=True, capture_output=True)
    return paths
