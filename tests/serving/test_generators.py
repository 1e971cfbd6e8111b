"""A decoder on a live server: streams of text, equal to what the bare loop generates, alone and beside others."""

import json
import queue
import shlex
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from triton_parts import TRITON, QuickServer
from writer_parts import bare_words, export_writer, generate, make_writer, serve_writer, write_writer

from compressor.errors import UserError
from compressor.pruning.surgery import Removal, remove
from compressor.tasks import TaskConfig
from export.generation.greedy import facts_of, open_live
from pipelines.cli.work.serve_work import request_of
from pipelines.runs.served import Served
from pipelines.stages.deploy.generating import compare_streamed, local_text, prompts_of, served_answer, tokenizer_of_prompts
from serving.deployment.answers import differences, read_answers, write_answers
from serving.deployment.triton_control import Control
from serving.generator_repository import version_facts, write_generator
from serving.layout.version_file import VersionFacts
from serving.predict import predict
from serving.repository import read_config, write_config

END, TURN = 1, "<|turn|>"
PROMPTS = ["w5 w6 w7 w8 w9", "w8 w9", "w5 w7 w9 w11 w13 w15 w17", "w20"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A Llama's export, and the folder of its tokenizer and config."""
    root = tmp_path_factory.mktemp("decoder")
    model = make_writer("llama", seed=3, max_position_embeddings=128, num_hidden_layers=1)
    last = model.config.vocab_size - 1
    model.lm_head.weight.data[[0, last]] = 0  # these two should not be likely: they are no words
    special = {0: "<unk>", END: "<end>", last: TURN}
    return export_writer(model, root, special, END, eos_token="<end>", additional_special_tokens=[TURN])


@pytest.fixture(scope="module")
def server(exported, tmp_path_factory, triton):
    with serve_writer(exported, tmp_path_factory.mktemp("served")) as running:
        yield running


def bare(exported, prompt, count):
    """The words that the bare loop generates."""
    return bare_words(exported, [int(word[1:]) for word in prompt.split()], count, END)


def test_special_tokens_of_a_prompt_are_read_as_in_training(exported, server):
    """Those of a chat's template; the comparison of `deploy` has its tokens from the training's tokenizer."""
    prompt, folder = f"{TURN} w5 w6", exported[1]
    last = len(Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()) - 1
    text, _, _ = generate(server, prompt, MAX_TOKENS=6, STREAM=False)
    assert "".join(text).split() == bare_words(exported, [last, 5, 6], 6, END)
    facts = vars(version_facts(facts_of(exported[0])["generation"], folder, "fp32"))
    tokenizer = tokenizer_of_prompts(folder)
    assert local_text(open_live(exported[0], "fp32"), tokenizer, prompt, facts, 6) == "".join(text)


@pytest.mark.slow
def test_prompts_that_leave_little_room_are_compared_with_fewer_tokens(exported, tmp_path, triton):
    """Rows may fill all 128 positions with their targets."""
    for name in ("train", "validation"):
        rows = [{"prompt": " ".join(["w5"] * count), "target": "w6"} for count in (122, 127)]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    files = {name: tmp_path / f"{name}.jsonl" for name in ("train", "validation")}
    task = TaskConfig(kind="generation", text="prompt", label="target", max_length=128, **files)
    inputs = SimpleNamespace(base=SimpleNamespace(folder=exported[1]), task=task, threads=1)
    write_generator(tmp_path / "repository", "writer", *exported, threads=1)
    answers = compare_streamed(tmp_path / "repository", "writer", exported[0], "fp32", inputs, tmp_path / "triton.log")
    counts = [next(one["data"][0] for one in answer.outputs if one["name"] == "TOKENS") for answer in answers]
    assert len(counts) == 2 and counts[0] <= 6 and counts[1] == 1


def test_recorded_texts_are_asked_for_again(server, exported, tmp_path):
    """What `compress deploy` proves a new version with."""
    control = Control.at(server.url)
    write_answers(tmp_path, [served_answer(control, "writer-text", prompt) for prompt in PROMPTS])
    answers = read_answers(tmp_path)
    assert not differences(answers, lambda answer: control.ask("writer-text", answer, 1))
    assert control.seconds("writer-text", answers[0]) > 0
    answers[1].outputs[0]["data"] = ["something else"]
    (line,) = differences(answers, lambda answer: control.ask("writer-text", answer))
    assert line.startswith("request 2: TEXT is [") and line.endswith("recorded ['something else']")


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_stream_whose_caller_has_gone_frees_its_place(tmp_path, triton, protocol):
    """Its text would be four times as long as one that is timed first."""
    model = make_writer("llama", seed=3, max_position_embeddings=8192, num_hidden_layers=1)
    model.lm_head.weight.data[:2] = 0
    exported = export_writer(model, tmp_path, {0: "<unk>", END: "<end>"}, END, eos_token="<end>")
    folder = write_generator(tmp_path / "repository", "writer", *exported, threads=1)
    config = read_config(folder)
    config.parameters["max_streams"].string_value = "1"
    write_config(config, folder)
    with QuickServer(folder.parent, log_path=tmp_path / "log") as running:
        start = time.monotonic()
        assert generate(running, "w5 w6", MAX_TOKENS=1000)[1] == 1000
        quarter = time.monotonic() - start
        hang_up(running, protocol)
        start = time.monotonic()
        assert generate(running, "w5", MAX_TOKENS=2)[1] == 2 and time.monotonic() - start < quarter


def hang_up(server, protocol):
    """Begin a stream of 4,000 tokens, and end it after the first."""
    if protocol == "http":
        body = {"TEXT": "w5 w6", "MAX_TOKENS": 4000}
        with httpx.stream("POST", f"http://{server.url}/v2/models/writer-text/generate_stream", json=body) as response:
            next(response.iter_lines())
        return
    from tritonclient.grpc import InferenceServerClient, InferInput

    text, count = InferInput("TEXT", [1], "BYTES"), InferInput("MAX_TOKENS", [1], "INT32")
    text.set_data_from_numpy(np.array([b"w5 w6"], object))
    count.set_data_from_numpy(np.array([4000], np.int32))
    came = queue.Queue()
    with InferenceServerClient(f"127.0.0.1:{server.ports['grpc']}") as client:
        client.start_stream(lambda result, error: came.put(error))
        client.async_stream_infer("writer-text", [text, count])
        assert came.get(timeout=60) is None
        client.stop_stream(cancel_requests=True)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_stream_is_what_the_bare_loop_generates(server, exported, prompt):
    expected = bare(exported, prompt, 24)
    pieces, tokens, finish = generate(server, prompt, MAX_TOKENS=24)
    assert "".join(pieces).split() == expected
    assert (finish, tokens) == (("length", 24) if len(expected) == 24 else ("end", len(expected) + 1))
    assert len(pieces) > min(3, len(expected)), "in pieces"


def test_many_at_a_time_are_as_alone(server, exported):
    """They join and leave one batch at different tokens."""
    asked = [(PROMPTS[number % 4], 3 + 5 * (number % 5)) for number in range(20)]
    with ThreadPoolExecutor(10) as pool:
        given = list(pool.map(lambda one: generate(server, one[0], MAX_TOKENS=one[1]), asked))
    for (prompt, count), (pieces, _, _) in zip(asked, given, strict=True):
        assert "".join(pieces).split() == bare(exported, prompt, count)


def test_a_stop_word_ends_the_text_before_it(server, exported):
    words = bare(exported, PROMPTS[0], 24)
    stop = f" {words[4]}"
    pieces, _, finish = generate(server, PROMPTS[0], MAX_TOKENS=24, STOP=[stop, "never"])
    whole = " ".join(words)
    assert finish == "stop" and " ".join("".join(pieces).split()) == whole[: whole.index(stop)].strip()


def test_samples_repeat_with_a_seed(server):
    options = {"MAX_TOKENS": 12, "TEMPERATURE": 5.0, "TOP_K": 40, "TOP_P": 0.95}
    first, again, other = (generate(server, PROMPTS[0], SEED=seed, **options)[0] for seed in (7, 7, 8))
    assert first == again != other


def test_whole_texts_over_http(server, exported):
    def post(path, **body):
        request = urllib.request.Request(
            f"http://{server.url}/v2/models/writer-text/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.read().decode()

    expected = bare(exported, PROMPTS[1], 8)
    whole = json.loads(post("generate", TEXT=PROMPTS[1], MAX_TOKENS=8, STREAM=False))
    assert whole["TEXT"].split() == expected
    events = [
        json.loads(line.removeprefix("data: "))
        for line in post("generate_stream", TEXT=PROMPTS[1], MAX_TOKENS=8).split("\n\n")
        if line
    ]
    assert "".join(event["TEXT"] for event in events).split() == expected and events[-1]["FINISH"] in ("length", "end")


def test_the_command_that_compress_serve_shows_is_answered(server):
    program, unbuffered, url, data, body = shlex.split(request_of("writer-text", server.url, Served(server.repository, Path())))
    assert (program, unbuffered, data) == ("curl", "-N", "-d")
    answer = httpx.post(f"http://{url}", content=body)
    assert answer.status_code == 200 and '"TOKENS":1' in answer.text


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("", {}, "from 1 to 128 tokens"),
        (b"\xff", {}, "not UTF-8"),
        ("w5", {"MAX_TOKENS": 128}, "from 1 to 128 tokens"),
        ("w5", {"MAX_TOKENS": 0}, "MAX_TOKENS is 0"),
        ("w5", {"TEMPERATURE": float("nan")}, "TEMPERATURE is nan"),
        ("w5", {"TOP_P": 0.0}, "TOP_P is 0.0"),
        ("w5", {"STOP": [""]}, "STOP must hold"),
    ],
)
def test_requests_that_are_wrong_are_refused_alone(server, exported, text, options, words):
    from tritonclient.utils import InferenceServerException

    with pytest.raises(InferenceServerException, match=words):
        generate(server, text, **{"MAX_TOKENS": 4, **options})
    assert "".join(generate(server, PROMPTS[1], MAX_TOKENS=4)[0]).split() == bare(exported, PROMPTS[1], 4)


def test_predict_says_how_a_model_that_generates_is_asked(server):
    """Not with Client.infer: Triton takes a single request for such a model by neither protocol."""
    with pytest.raises(UserError, match=r"E716 .*continues texts\. Send its prompts to the server's generate_stream$"):
        predict(server.url, "writer", ["w5"])


def test_the_front_passes_no_generated_text_on(server):
    pytest.importorskip("fastapi")
    from starlette.testclient import TestClient

    from serving.front.app import Settings, make_app

    with TestClient(make_app(Settings(f"127.0.0.1:{server.ports['grpc']}"))) as front:
        response = front.post("/predict", json={"texts": ["w1 w2"]})
        assert (response.status_code, response.json()["code"]) == (400, "E767"), response.text


def test_a_repository_of_generators(exported, tmp_path):
    folder = write_generator(tmp_path, "writer", *exported)
    assert read_config(folder).model_transaction_policy.decoupled
    with pytest.raises(UserError, match="E720"):
        write_generator(tmp_path, "writer", *exported)
    with pytest.raises(UserError, match="E602"):
        write_generator(tmp_path, "other", *exported, precision="int8")


def test_a_generator_without_a_tokenizer_leaves_nothing(exported, tmp_path):
    """What was half written would be 'already there' for the next call."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_bytes((exported[1] / "config.json").read_bytes())
    with pytest.raises(UserError, match=r"E723 .*no tokenizer\.json"):
        write_generator(tmp_path / "repository", "writer", exported[0], tmp_path / "model")
    assert not (tmp_path / "repository").exists()


@pytest.fixture
def decoding(modules):
    """The backend's module, as the server's stub imports it."""
    modules("compress_generate", "model")
    return sys.modules["decoding"]


class Sender:
    """Where Triton takes a request's answers; like Triton's it is closed by the last one."""

    def __init__(self, cancelled=False):
        self.words, self.error, self.closed, self.cancelled = [], None, threading.Event(), cancelled

    def is_cancelled(self):
        return self.cancelled

    def send(self, response=None, flags=0):
        if self.closed.is_set():
            raise TRITON.TritonModelException("Unable to send response. Response sender has been closed.")
        if response is not None:
            self.error = self.error or response.error
            self.words += [] if response.error else response.tensors["TEXT"][0].decode().split()
        if flags:
            self.closed.set()


@pytest.fixture
def queued(modules, decoding, exported):
    """A backend with room for two texts, whose thread has not started, and what puts a request into its queue."""
    module, tokenizer = modules("compress_generate", "model"), Tokenizer.from_file(str(exported[1] / "tokenizer.json"))
    backend, batch = module.TritonPythonModel(), decoding.Batch(open_live(exported[0], "fp32"))
    backend.batch, backend.most, backend.waiting = batch, 2, queue.Queue()

    def ask(prompt, count, cancelled=False):
        settings = decoding.Settings(max_tokens=count)
        text = decoding.Text(tokenizer, settings, frozenset({END}))
        stream = module.Stream(Sender(cancelled), decoding.prompt_ids(tokenizer, prompt), text, settings, True)
        backend.waiting.put(stream)
        return stream.sender

    return backend, ask


@pytest.mark.parametrize("piece", [1, 3, 128])
def test_a_long_prompt_is_read_in_pieces(queued, exported, monkeypatch, piece):
    """The logits of all its tokens, over the vocabulary, may be more than there is memory for."""
    backend, ask = queued
    backend.batch.piece, run, lengths = piece, backend.batch._run, []
    monkeypatch.setattr(backend.batch, "_run", lambda ids, *rest: lengths.append(ids.shape[1]) or run(ids, *rest))
    prompt = " ".join(f"w{number}" for number in range(2, 12))
    stream = ask(prompt, 3)
    assert backend.advance() and backend.advance()
    assert stream.words == bare(exported, prompt, 3)
    assert max(lengths) == min(piece, 10) and sum(lengths) == 10 + 2


def test_the_logits_of_a_prompt_are_bounded(exported, decoding):
    vocabulary = open_live(exported[0], "fp32").get_outputs()[0].shape[-1]
    assert decoding.Batch(open_live(exported[0], "fp32")).piece == decoding.MOST_LOGITS // vocabulary


def test_the_first_token_behind_an_encoder_may_be_number_0():
    """T5's is."""
    facts = VersionFacts(task="text2text", labels=(), max_length=9, pad_id=0, vocabulary=9, positions=9, start=0)
    written = json.loads(facts.to_json())
    assert written["start"] == 0 and not {"prefix", "stripped"} & written.keys()


@pytest.mark.parametrize(("stripped", "ids"), [(True, [0]), (False, [1])])
def test_a_prompt_is_read_as_kind_generation_trains(modules, stripped, ids):
    """A chat's template may end in white space: an export that is served by itself keeps it."""
    backend = modules("compress_generate", "model").TritonPythonModel()
    backend.tokenizer, backend.start = Tokenizer(models.WordLevel({"Answer:": 0, "?": 1}, unk_token="?")), None
    backend.facts = {"positions": 128, "stripped": stripped}
    assert backend.ids_of("Answer:\n", 1) == ids


def test_each_prompt_that_leaves_room_is_proved_once(tmp_path):
    """A prompt with several targets has a row for each. A model with rotary positions is trained on any length, and a server
    generates within max_position_embeddings."""
    rows = [{"prompt": prompt, "target": ["a", "b"]} for prompt in ("w5 w5 w5", "w5", "w6 w6", "w6")]
    for name in ("train", "validation"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    files = {name: tmp_path / f"{name}.jsonl" for name in ("train", "validation")}
    task = TaskConfig(kind="generation", text="prompt", label="target", **files)
    assert prompts_of(task, lambda prompt: 2 - len(prompt.split())) == [("w5", 1), ("w6", 1)]
    with pytest.raises(UserError, match=r"E113 .*validation\.jsonl: every validation prompt fills all positions"):
        prompts_of(task, lambda prompt: 0)


def test_a_pruned_model_is_served_by_a_process_that_has_loaded_none(tmp_path):
    """Its config.json has a type that transformers does not know by itself."""
    model = make_writer("llama", seed=3, max_position_embeddings=128, num_hidden_layers=1)
    remove(model, {0: Removal(neurons=[0])})
    folder = write_writer(model, tmp_path, {0: "<unk>", END: "<end>"}, END, eos_token="<end>")
    code = (
        "from pathlib import Path; from serving.generator_repository import version_facts\n"
        f"print(version_facts({{'start': None, 'ends': [1], 'pad': 0}}, Path({str(folder)!r}), 'fp32').positions)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["128"], done.stderr


def test_requests_of_one_token_do_not_hold_up_a_stream(queued, exported):
    """They take no room, and yet no more of them are computed before its next token than there is room for."""
    backend, ask = queued
    stream, others = ask(PROMPTS[0], 3), [ask(PROMPTS[1], 1) for _ in range(20)]
    assert backend.advance() and backend.advance()
    assert stream.words == bare(exported, PROMPTS[0], 3)
    assert sum(sender.closed.is_set() for sender in others) == 2


def test_the_prompt_of_a_caller_that_has_gone_is_not_computed(queued, monkeypatch):
    backend, ask = queued
    sender = ask(PROMPTS[0], 4, cancelled=True)
    monkeypatch.setattr(backend.batch, "join", None)
    backend.join(backend.waiting.get())
    assert sender.closed.is_set() and sender.error is None and not backend.batch.rows


@pytest.mark.parametrize("fault", ["join", "step", "leave"])
def test_after_a_fault_while_texts_are_computed_requests_are_answered(queued, exported, fault):
    """It ends those that were being computed, and neither the thread nor those that wait."""
    backend, ask = queued

    def fail(*_):
        vars(backend.batch).pop(fault)
        raise MemoryError("no memory for the cache")

    setattr(backend.batch, fault, fail)
    asked = [ask(PROMPTS[0], 4), ask(PROMPTS[1], 6), ask(PROMPTS[2], 5)]
    backend.thread = threading.Thread(target=backend.generate, daemon=True)
    backend.thread.start()
    assert all(sender.closed.wait(30) for sender in asked), "each has an end"
    assert asked[2].words == bare(exported, PROMPTS[2], 5)
    failed = {"join": [True, False, False], "step": [True, True, False], "leave": [False, True, False]}[fault]
    assert ["no memory" in str(sender.error) for sender in asked] == failed
    backend.finalize()
    assert not backend.thread.is_alive()


def panic(*_):
    """As a panic of the tokenizer, which is written in Rust, reaches Python."""
    raise BaseException("PanicException")


def test_a_panic_while_a_text_is_decoded_ends_it_alone(queued, exported):
    """At its first token, and behind it; the thread serves the others."""
    backend, ask = queued
    asked = [ask(PROMPTS[0], 4), ask(PROMPTS[1], 4), ask(PROMPTS[2], 5)]
    first, later, _ = (stream.text for stream in backend.waiting.queue)
    step = later.decoder.step
    first.decoder = SimpleNamespace(step=panic)
    later.decoder = SimpleNamespace(step=lambda *given: step(*given) if later.tokens == 1 else panic())
    backend.thread = threading.Thread(target=backend.generate, daemon=True)
    backend.thread.start()
    assert all(sender.closed.wait(30) for sender in asked), "each has an end"
    assert [str(sender.error) for sender in asked[:2]] == ["generation error: the tokenizer failed: PanicException"] * 2
    assert asked[2].words == bare(exported, PROMPTS[2], 5) and asked[2].error is None
    assert asked[1].words == bare(exported, PROMPTS[1], 1)
    backend.finalize()
    assert not backend.thread.is_alive()


@pytest.mark.parametrize("start", [None, 0])
def test_a_panic_while_a_text_is_read_ends_its_request_alone(queued, start):
    """As a prompt, and as a source of an encoder."""
    backend, _ = queued
    backend.start, backend.ends, backend.facts = start, frozenset({END}), {"positions": 256}
    backend.tokenizer = SimpleNamespace(encode=lambda text: panic() if "odd" in text else SimpleNamespace(ids=[5], offsets=[]))
    senders = [Sender() for _ in range(3)]
    texts = (b"w5", b"odd", b"w6")
    backend.execute([generation_request(text, sender) for text, sender in zip(texts, senders, strict=True)])
    assert [bool(sender.error) for sender in senders] == [False, True, False] and backend.waiting.qsize() == 2
    assert senders[1].closed.is_set() and senders[1].error.code == "INTERNAL"


def generation_request(text, sender):
    """A request as Triton gives it to the backend."""
    tensor = SimpleNamespace(name=lambda: "TEXT", as_numpy=lambda: np.array([text], object))
    return SimpleNamespace(get_response_sender=lambda: sender, inputs=lambda: [tensor])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_whose_outputs_are_not_finite_ends_alone(modules, decoding, exported, monkeypatch, temperature):
    module, tokenizer = modules("compress_generate", "model"), Tokenizer.from_file(str(exported[1] / "tokenizer.json"))
    backend, batch = module.TritonPythonModel(), decoding.Batch(open_live(exported[0], "fp32"))
    backend.batch, run = batch, batch._run

    def broken(*arguments):
        logits, past = run(*arguments)
        if len(logits) == 2:
            logits[0, -1, 3] = np.nan
        return logits, past

    monkeypatch.setattr(batch, "_run", broken)
    streams = []
    drawn = decoding.Settings(temperature=temperature, seed=0)
    for prompt, settings in ((PROMPTS[0], drawn), (PROMPTS[1], decoding.Settings(5))):
        text = decoding.Text(tokenizer, settings, frozenset({END}))
        streams.append(module.Stream(Sender(), decoding.prompt_ids(tokenizer, prompt), text, settings, True))
        backend.join(streams[-1])
    while batch.rows:
        backend.step()
    assert "not finite" in str(streams[0].sender.error) and streams[1].sender.error is None
    assert streams[1].sender.words == bare(exported, PROMPTS[1], 5)


class Words:
    """A decoder that gives the tokens' own texts."""

    def __init__(self, *texts):
        self.texts = list(texts)

    def step(self, _tokenizer, token):
        return self.texts[token]


@pytest.mark.parametrize(
    ("texts", "stop", "given"),
    [
        (["a", "b", "c"], ("bc",), ["a", "", ""]),
        (["a", "b", "d"], ("bc",), ["a", "", "bd"]),
        (["a", "xb", "cy"], ("bc",), ["a", "x", ""]),
        (["end", "en", "d"], ("end",), [""]),
        (["a", "aa", "b"], ("aab",), ["", "a", ""]),
        (["", "a", "b"], (), ["", "a", "b"]),
    ],
)
def test_what_may_become_a_stop_word_is_held_back(decoding, texts, stop, given):
    text = decoding.Text(None, decoding.Settings(stop=stop), frozenset(), decoder=Words(*texts))
    said = []
    for token in range(len(texts)):
        said.append(text.add(token))
        if text.finish:
            break
    assert said == given


def byte_tokenizer():
    """Bytes as tokens, as Llama's tokenizer has them for what it has no word for."""
    vocabulary = {"<unk>": 0, "▁a": 1, "x": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer, vocabulary


@pytest.mark.parametrize(
    ("tokens", "given"),
    [
        (["▁a", "<0x0A>", "<0xE2>", "x", "▁a"], "a\n\ufffdx a"),
        (["▁a", "<0x0A>", "<0xE2>", "▁a"], "a\n\ufffd a"),
        (["▁a", "<0x0A>", "<0xE2>", "<0x82>", "<0xAC>", "▁a"], "a\n€ a"),
    ],
)
def test_a_character_that_stays_incomplete_does_not_end_a_text(decoding, tokens, given):
    tokenizer, vocabulary = byte_tokenizer()
    text = decoding.Text(tokenizer, decoding.Settings(), frozenset())
    assert "".join(text.add(vocabulary[token]) for token in tokens) == given


def test_draws_follow_the_probabilities(decoding):
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    settings = decoding.Settings(temperature=1.0, top_p=0.7, seed=0)
    drawn = np.bincount([settings.choose(logits) for _ in range(4000)], minlength=4) / 4000
    assert drawn == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    settings = decoding.Settings(temperature=1.0, top_k=3, seed=0)
    drawn = np.bincount([settings.choose(logits) for _ in range(4000)], minlength=4) / 4000
    assert drawn == pytest.approx([0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0], abs=0.03)
    assert decoding.Settings().choose(logits) == 0
