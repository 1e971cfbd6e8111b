"""Scoring by decoding: texts are those of one token at a time, metrics are those of the libraries, references are grouped."""

import importlib.util
import json

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from sacrebleu.metrics import BLEU, CHRF, TER
from transformers import AutoModelForCausalLM

from compressor.errors import UserError, UserErrors
from compressor.methods import Options, apply
from compressor.models.special_tokens import tokenizer_of
from compressor.pruning.surgery import Removal, remove
from compressor.tasks import TaskConfig
from compressor.tasks.data import read_data
from compressor.tasks.decoding.answer_extraction import answer_of
from compressor.tasks.decoding.decode_config import PACKAGES, DecodeConfig
from compressor.tasks.decoding.generate_texts import _limits, _text_of, generate_texts, prompts_of_a_batch
from compressor.tasks.decoding.prompt_items import PromptItem, check_positions
from compressor.tasks.decoding.text_metrics import TEXT_METRICS
from compressor.tasks.decoding.text_quality import change, read_statistics, score_texts
from compressor.tasks.reading import check_data, read_task
from tests.compressor.conftest import tiny
from tests.tiny import DECODERS, write_model, write_tokenizer

# --- metrics ---

GUIDE = "It is a guide to action which ensures that the military always obeys the commands of the party"
TROOPS = "It is to insure the troops forever hearing the activity guidebook that party direct"
ACTIONS = [
    "It is a guide to action that ensures that the military will forever heed Party commands",
    "It is the guiding principle which guarantees the military forces always being under the command of the Party",
    "It is the practical guide for the army always to heed the directions of the party",
]
"""The example in nltk's documentation."""
DOGS = ["The dog bit the man.", "It wasn't surprising.", "The man had just bitten him."]
DOG_REFERENCES = [
    ["The dog bit the man.", "The dog had bit the man."],
    ["It was not unexpected.", "No one was surprised."],
    ["The man bit him first.", "The man had bitten the dog."],
]
"""The example in sacrebleu's README."""
FOX = ["The quick brown dog jumps on the log."], [["The quick brown fox jumps over the lazy dog"]]
"""The example in rouge-score's documentation."""


def value(key: str, texts, references) -> float:
    metric = TEXT_METRICS[key]
    return metric.scale * metric.value(metric.statistics(texts, references))


@pytest.mark.parametrize(
    ("key", "texts", "references", "documented"),
    [
        ("bleu", DOGS, DOG_REFERENCES, 48.53),
        ("chrf", DOGS, DOG_REFERENCES, 59.73),
        ("ter", ["d e f g h a b c"], [["a b c d e f g h"]], 12.5),
        ("nist", [GUIDE], [ACTIONS], 3.37),
        ("nist", [TROOPS], [ACTIONS], 1.46),
        ("meteor", [GUIDE], [ACTIONS], 69.44),
        ("rouge_1", *FOX, 70.59),
        ("rouge_2", *FOX, 26.67),
        ("rouge_l", *FOX, 58.82),
        ("exact_match", DOGS, DOG_REFERENCES, 33.33),
    ],
)
def test_a_metric_has_the_value_that_its_library_documents(key, texts, references, documented):
    assert value(key, texts, references) == pytest.approx(documented, abs=0.005)


@pytest.mark.parametrize(
    ("text", "reference", "shared"),
    [
        ("Кошка спит на окне.", "Кошка спит на окне.", 1.0),
        ("Кошка спит", "Собака спит", 0.5),
        ("नमस्ते दुनिया", "नमस्ते दुनियाँ", 0.5),  # a vowel sign is part of its word
        ("un été naïf", "un e\u0301te\u0301 nai\u0308f", 1.0),
        ("un été naïf", "un ete naif", 1 / 3),
        ("...", "...", 0.0),
    ],
)
def test_rouge_counts_words_of_every_script(text, reference, shared):
    assert value("rouge_1", [text], [[reference]]) == pytest.approx(100 * shared)


def test_rouge_of_ascii_texts_is_that_of_rouge_score():
    from rouge_score.rouge_scorer import RougeScorer  # it loads nltk, in seconds

    texts = [GUIDE, TROOPS, "snake_case_words, 3.5% of the cats' Running!", "it's\tJUMPED_over\nthe_dogs 7"]
    for key, kind in (("rouge_1", "rouge1"), ("rouge_2", "rouge2"), ("rouge_l", "rougeL")):
        scorer = RougeScorer([kind], use_stemmer=True)
        for text in texts:
            for other in [*texts, *ACTIONS, "the words of snakes, 3 5 running cat jump dog"]:
                assert value(key, [text], [[other]]) == 100 * scorer.score(other, text)[kind].fmeasure


def test_figures_of_items_add_up_to_the_libraries_scores_of_a_corpus():
    """With unequal numbers of references, and a text that is empty."""
    from nltk.translate.nist_score import corpus_nist

    texts, references = [*DOGS, "", TROOPS], [*DOG_REFERENCES, ["The man."], ACTIONS]
    streams = [[of[place] if place < len(of) else None for of in references] for place in range(3)]
    for key, metric in (("bleu", BLEU(force=True)), ("chrf", CHRF()), ("ter", TER())):
        assert value(key, texts, references) == pytest.approx(metric.corpus_score(texts, streams).score, abs=1e-9)
    texts, references = [GUIDE, TROOPS, ""], [ACTIONS, ACTIONS[:1], ACTIONS[1:]]
    expected = corpus_nist([[one.split() for one in of] for of in references], [text.split() for text in texts])
    assert value("nist", texts, references) == pytest.approx(expected, abs=1e-9)


def test_every_metric_has_a_row_and_resamples():
    assert list(PACKAGES) == list(TEXT_METRICS)
    items = [PromptItem(f"p{row}", tuple(of), row) for row, of in enumerate(DOG_REFERENCES)] * 5
    scored = score_texts(items, DOGS * 5, DecodeConfig(metrics=list(PACKAGES)))
    for key, (low, high) in scored.intervals.items():
        assert low <= scored.values[key] <= high and low < high
    best = score_texts(items, [item.references[0] for item in items], DecodeConfig(metrics=["bleu", "ter"]))
    gain, (low, high) = change("bleu", best.statistics["bleu"], scored.statistics["bleu"])
    assert best.values == {"bleu": pytest.approx(1), "ter": pytest.approx(0)} and 0 < low < gain < high
    assert change("bleu", scored.statistics["bleu"], scored.statistics["bleu"]) == (0.0, (0.0, 0.0))


def test_items_scored_some_at_a_time_have_the_figures_of_all_at_once(monkeypatch):
    """With unequal numbers of references; NIST weighs the references of all items."""
    items = [PromptItem("p", tuple(of), 0) for of in (*DOG_REFERENCES, ["The man."], ACTIONS)]
    texts, steps = [*DOGS, "", TROOPS], []
    config = DecodeConfig(metrics=list(PACKAGES))
    monkeypatch.setattr("compressor.tasks.decoding.text_quality.AT_ONCE", 2)
    scored = score_texts(items, texts, config, steps.append)
    for key, metric in TEXT_METRICS.items():
        assert np.array_equal(scored.statistics[key], metric.statistics(texts, [item.references for item in items])), key
    assert sum(steps) == len(items) * len(PACKAGES) and max(steps) == len(items) and min(steps) < 3


def test_what_is_written_is_read_again(tmp_path):
    items = [PromptItem("a\u2028b", ("The dog bit the man.",), 0)]
    scored = score_texts(items, ["the dog bit the man."], DecodeConfig(metrics=["bleu", "exact_match"], lowercase=True))
    scored.write(tmp_path / "texts.jsonl")
    again = read_statistics(tmp_path / "texts.jsonl")
    assert scored.values == {"bleu": pytest.approx(1), "exact_match": 1.0}
    assert all(np.array_equal(again[key], figures) for key, figures in scored.statistics.items())
    assert scored.record["examples"] == [
        {"prompt": "a\u2028b", "text": "the dog bit the man.", "references": ["The dog bit the man."]}
    ]


# --- answers ---


@pytest.mark.parametrize(
    ("text", "pattern", "answer"),
    [
        ("so 3 + 4 = 7.", "number", "7"),
        ("#### 1,250.00", "number", "1250"),
        ("it costs $18", "number", "18"),
        ("10-3", "number", "3"),
        ("it is −0.50 degrees", "number", "-0.5"),
        ("007 of 100", "number", "100"),
        ("about .5", "number", "0.5"),
        ("at -.25 degrees", "number", "-0.25"),
        ("so...5, as in no.7", "number", "7"),
        ("the points 1,2345", "number", "2345"),
        ("-0", "number", "0"),
        ("1e5", "number", "100000"),
        ("2e5", "number", "200000"),
        ("-1.5E-2 m", "number", "-0.015"),
        ("1,250.5e1", "number", "12505"),
        ("1e99999999", "number", "99999999"),  # no exponent
        ("5e", "number", "5"),
        ("10 000", "number", "10000"),
        ("10\u00a0000 or 1\u202f250\u202f000.50", "number", "1250000.5"),
        ("about 3 400 apples", "number", "3400"),  # by the rule: one to three digits, then exactly three
        ("3 40", "number", "40"),
        ("3 4000", "number", "4000"),
        ("1234 567", "number", "567"),
        ("1234,567", "number", "567"),
        ("0.5 100", "number", "100"),
        ("1 000 2,500", "number", "2500"),
        ("room 5 100,000", "number", "100000"),
        ("5, 100", "number", "100"),
        ("5\n100", "number", "100"),
        ("none", "number", None),
        ("A: yes. B: no", r"[AB]: (\w+)", "no"),
        ("A: yes", r"[AB]: \w+", "A: yes"),
        ("?", r"[AB]", None),
        ("A:", r"A:(\w*)", None),
    ],
)
def test_the_answer_is_the_last_number_or_match(text, pattern, answer):
    assert answer_of(text, pattern) == answer


def test_answers_are_compared_by_their_value():
    items = [PromptItem("p", ("1,250", "3"), 0), PromptItem("q", ("2",), 1), PromptItem("r", ("2",), 2)]
    texts = ["first 7, then 1250.0", "7", "no number"]
    scored = score_texts(items, texts, DecodeConfig(metrics=["exact_match"], answer="number"))
    assert scored.values == {"exact_match": pytest.approx(1 / 3)}


# --- prompts and references ---

ROWS = [("a", "x 1"), ("b", ["y 2", "z 3"]), ("a", "w 4"), ("c", "v 5")]


def task(folder, data=ROWS, **decode) -> TaskConfig:
    for name in ("train", "validation"):
        lines = (json.dumps({"prompt": prompt, "target": target}) for prompt, target in data)
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    files = {name: folder / f"{name}.jsonl" for name in ("train", "validation")}
    return TaskConfig(kind="generation", max_length=16, decode=decode, **files)


def test_equal_prompts_are_one_item_and_a_list_is_several_references(tmp_path):
    model = write_model(tmp_path / "model", "llama", auto="AutoModelForCausalLM")
    rows = [
        ("the film", "was good"),
        ("a plot", ["was bad", "was a very dull story"]),
        ("the film", "was great"),
        ("plot", "a"),
    ]
    data = read_data(model, task(tmp_path, rows))
    assert [(item.prompt, item.references) for item in data.validation.items] == [
        ("the film", ("was good", "was great")),
        ("a plot", ("was bad", "was a very dull story")),
        ("plot", ("a",)),
    ]
    assert len(data.validation) == len(data.train) == 5, "each reference is a row, and learnt from"
    assert [len(prompt) for prompt in data.validation.prompts] == [3, 3, 2], "with the token at the beginning of every text"
    assert [item.prompt for item in read_data(model, task(tmp_path, rows, rows=2)).validation.items] == ["the film", "plot"]
    with pytest.raises(UserError, match=r"E241 .*a prompt of 2 tokens and 63 new ones exceed .* at most 62"):
        read_data(write_model(tmp_path / "short", "gpt2", auto="AutoModelForCausalLM"), task(tmp_path, rows, max_new_tokens=63))
    with pytest.raises(UserError, match=r"E241 .*a prompt of 4 tokens and 1 new ones exceed .*4 positions. Shorten or drop"):
        check_positions([[1, 2], [1, 2, 3, 4]], DecodeConfig(max_new_tokens=1), 4, tmp_path)


def test_what_cannot_be_scored_is_told_with_its_rows(tmp_path, monkeypatch):
    read_task(task(tmp_path, metrics=["exact_match"], answer="number"))
    unread = task(tmp_path, [*ROWS, ("d", "none"), ("e", ["6", "nothing"])], metrics=["exact_match"], answer="number")
    with pytest.raises(UserError, match=r"E240 .*validation.jsonl:5: .*'none' has no number; such rows: 2 \(lines 5, 6\)"):
        read_task(unread)
    with pytest.raises(UserError, match=r"E240 .*validation.jsonl:1: .*has no match of '#### \(\.\+\)'; such rows: "):
        check_data(task(tmp_path, metrics=["exact_match"], answer="#### (.+)"))
    with pytest.raises(UserErrors, match=r"E207 .*train.jsonl:1: column 'target' holds \[\]"):
        read_task(task(tmp_path, [("a", [])]))
    with pytest.raises(UserErrors, match=r"E206 .*train.jsonl:1: column 'prompt' holds nothing"):
        read_task(task(tmp_path, [(None, ["a"])]))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"E901 the metric nist needs the package nltk and sacrebleu.*\[metrics\]"):
        read_task(task(tmp_path, metrics=["nist"]))


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"metrics": ["bleu", "bleu"]}, "each metric at most once"),
        ({"answer": "number"}, "answer is used by the metric exact_match"),
        ({"answer": "(", "metrics": ["exact_match"]}, "answer is neither 'number' nor a regular expression"),
        ({"answer": "(a)(b)", "metrics": ["exact_match"]}, "at most one group"),
        ({"length_penalty": 0.8}, "length_penalty is used with beams above 1"),
    ],
)
def test_mistakes_in_the_keys(keys, says):
    with pytest.raises(ValidationError, match=says):
        DecodeConfig(**keys)


def test_other_kinds_do_not_decode():
    with pytest.raises(ValidationError, match="decode is used by tasks of kind generation and text2text"):
        TaskConfig(train="a.csv", validation="b.csv", decode={})


# --- texts ---


class Numbers:
    """A tokenizer whose texts are the numbers of the tokens."""

    eos_token_id = 3

    def decode(self, tokens, **_):
        return " ".join(map(str, tokens))


def test_a_text_is_written_as_the_server_writes_it(tmp_path):
    """A tokenizer saved by transformers 4 may ask for "a." where the model wrote "a ."."""
    write_tokenizer(tmp_path, "t5")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"clean_up_tokenization_spaces": True}))
    words = json.loads((tmp_path / "tokenizer.json").read_text())
    words["model"]["vocab"] |= {".": len(words["model"]["vocab"])}
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    tokenizer = tokenizer_of(tmp_path)
    ids = tokenizer("a film .", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == "a film." and _text_of([*ids, tokenizer.eos_token_id, ids[0]], tokenizer) == "a film ."


def alone(model, prompt: list[int], count: int) -> str:
    """Greedy search without padding and without a cache."""
    ids = list(prompt)
    with torch.no_grad():
        while len(ids) < len(prompt) + count and (next_one := int(model(torch.tensor([ids])).logits[0, -1].argmax())) != 3:
            ids.append(next_one)
    return " ".join(map(str, ids[len(prompt) :]))


PROMPTS = [[5, 8, 9], [6], [7, 7, 11, 12, 30, 31], [8, 40]]


@pytest.mark.parametrize("architecture", DECODERS)
@pytest.mark.parametrize("method", ["lora", "prefix"])
def test_texts_are_those_of_one_token_at_a_time(architecture, method):
    """Of a model with changes, pruned heads, and settings of its own that sample."""
    model = tiny(architecture, torch.float64, 0, auto=AutoModelForCausalLM)
    if method == "lora":
        remove(model, {0: Removal([1], [0, 5, 7])})
    apply(model, method, Options(group="1", modules=("query", "value"), rank=2, alpha=4.0))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.5)
    model.generation_config.update(do_sample=True, temperature=5.0, repetition_penalty=9.0)
    expected = [alone(model.eval(), prompt, 7) for prompt in PROMPTS]
    done = []
    texts = generate_texts(model, Numbers(), PROMPTS, DecodeConfig(max_new_tokens=7), 0, done.append)
    assert texts == expected and sum(done) == len(PROMPTS) and model.generation_config.do_sample
    wide = generate_texts(model, Numbers(), PROMPTS, DecodeConfig(max_new_tokens=7, beams=12, length_penalty=0.0), 0)
    both = zip(PROMPTS, wide, texts, strict=True)
    gains = [log_likelihood(model, prompt, ours, 7) - log_likelihood(model, prompt, text, 7) for prompt, ours, text in both]
    assert sum(gains) >= -1e-9, "a wide beam finds texts that are likelier"
    short = generate_texts(model, Numbers(), PROMPTS, DecodeConfig(max_new_tokens=7, no_repeat_ngram=1), 0)
    assert all(len(set(text.split())) == len(text.split()) for text in short)


def test_an_ngram_of_the_prompt_may_occur_again():
    (limit,) = _limits(DecodeConfig(no_repeat_ngram=1), length=2)
    scores = limit(torch.tensor([[5, 6, 7]]), torch.zeros(1, 9))
    assert scores[0].isinf().tolist() == [token == 7 for token in range(9)]


def log_likelihood(model, prompt: list[int], text: str, count: int) -> float:
    """Of a generated text, its end included if it ended."""
    tokens = [int(word) for word in text.split()]
    tokens += [3] * (len(tokens) < count)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return float(logits[range(len(tokens)), tokens].sum())


@pytest.mark.parametrize(("beams", "device", "expected"), [(1, "cpu", 32), (10, "cpu", 3), (10, "cuda", 25)])
def test_a_gpu_generates_for_more_prompts_at_a_time(beams, device, expected):
    assert prompts_of_a_batch(DecodeConfig(beams=beams), torch.device(device)) == expected
