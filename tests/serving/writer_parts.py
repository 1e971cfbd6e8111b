"""Tiny models that write texts: exported with a tokenizer whose words are w0, w1, ..., served, and asked."""

import contextlib
import queue

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from triton_parts import QuickServer

from compressor.checkpoint import save_checkpoint
from export.generation.greedy import open_generator
from export.standalone.folder import export_folder
from serving.generator_repository import write_generator
from tests.compressor.conftest import tiny
from tests.compressor.test_heads import GENERATES

NAME = "writer"


def make_writer(architecture, seed, **keys):
    """A model with a head of its own: one that is tied to random embeddings says one token for ever."""
    model = tiny(architecture, torch.float32, auto=GENERATES[architecture], **keys)
    torch.manual_seed(seed)
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    return model


def export_writer(model, root, special, end, processor=None, **names):
    """(export, folder of the tokenizer and config), with the arguments of `write_writer`."""
    folder = write_writer(model, root, special, end, processor, **names)
    export_folder(str(folder), root / "onnx", precisions=["fp32"])
    return root / "onnx", folder


def write_writer(model, root, special, end, processor=None, **names):
    """The folder of a model and its tokenizer. `special` has the texts of tokens that are no words, by their numbers, `names`
    what the tokenizer calls them, `end` is the number of the last token of a text."""
    words = {special.get(number, f"w{number}"): number for number in range(model.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=special[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if processor is not None:
        tokenizer.post_processor = processor
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=special[0], **names).save_pretrained(root / "words")
    model.config.eos_token_id = model.generation_config.eos_token_id = end
    save_checkpoint(model, root / "model", root / "words")
    return root / "model"


@contextlib.contextmanager
def serve_writer(exported, folder, **options):
    """A live server of an export."""
    write_generator(folder / "repository", NAME, *exported, threads=1, **options)
    with QuickServer(folder / "repository", log_path=folder / "triton.log") as running:
        yield running


def bare_words(exported, ids, count, end):
    """The words that the bare loop generates behind one row of tokens."""
    row = np.array([ids])
    tokens = open_generator(exported[0])(row, np.ones_like(row), count)[0].tolist()
    return [f"w{token}" for token in tokens[: tokens.index(end) if end in tokens else None]]


def generate(server, text, **options):
    """(pieces, tokens, why it ended) by gRPC."""
    from tritonclient.grpc import InferenceServerClient, InferInput

    kinds = {"MAX_TOKENS": np.int32, "TEMPERATURE": np.float32, "TOP_K": np.int32, "TOP_P": np.float32, "SEED": np.int64}
    values = {"TEXT": np.array([text.encode() if isinstance(text, str) else text], dtype=object)}
    for name, option in options.items():
        if name == "STOP":
            values[name] = np.array([word.encode() for word in option], dtype=object)
        else:
            values[name] = np.array([option], dtype=kinds.get(name, bool))
    types = {"STOP": "BYTES", "TEXT": "BYTES", "STREAM": "BOOL", "SEED": "INT64"}
    inputs = []
    for name, array in values.items():
        datatype = types.get(name) or ("FP32" if array.dtype == np.float32 else "INT32")
        tensor = InferInput(name, array.shape, datatype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    came = queue.Queue()
    with InferenceServerClient(f"127.0.0.1:{server.ports['grpc']}") as client:
        client.start_stream(lambda result, error: came.put((result, error)))
        client.async_stream_infer(f"{NAME}-text", inputs)
        pieces = []
        while True:
            result, error = came.get(timeout=60)
            if error is not None:
                raise error
            pieces.append(result.as_numpy("TEXT")[0].decode())
            if finish := result.as_numpy("FINISH")[0].decode():
                return pieces, int(result.as_numpy("TOKENS")[0]), finish
