"""Random variants of texts."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers

from compressor.models.special_tokens import tokenizer_of
from compressor.tasks import TaskConfig
from compressor.tasks.augmentation import CHANGES, continued, mixed, part, pieces, shortened, variants
from compressor.tasks.reading import read_task
from compressor.tasks.rows import Split, read_by, spaced
from compressor.tasks.texts import new_texts
from tests.tiny import write_tokenizer

ROWS = [("the film was good and very long",), ("a plot that nobody needs",), ("fine",), ("  two   words ",)]
PAIRS = [("the film was good", "it is a good film"), ("a dull plot", "the plot is dull")]
TEXT = st.text(min_size=1).filter(str.strip)


def test_every_row_has_as_many_new_ones_and_the_seed_decides_which():
    made = list(variants(ROWS, 3, seed=0))
    assert made == list(variants(ROWS, 3, seed=0)) != list(variants(ROWS, 3, seed=1))
    assert len(made) == len(set(made)) <= 3 * len(ROWS) and not set(made) & set(ROWS)


def test_texts_of_the_task_are_left_out():
    every = list(variants(ROWS, 5, seed=0))
    known = set(every[:4])
    assert not known & set(variants(ROWS, 5, seed=0, known=known))


def test_a_row_that_differs_in_white_space_alone_is_no_variant():
    rows = [("good film ",), (" a  plot",)]
    known = {("film",), ("good",), ("a",), ("plot",)}
    made = [text.split() for (text,) in variants(rows, 50, seed=0, known=known)]
    assert made and not [words for words in made if words in (["good", "film"], ["a", "plot"])]


def test_a_row_that_an_uncased_tokenizer_reads_alike_is_no_variant(tmp_path):
    """Words of a row, too."""
    write_tokenizer(tmp_path, "bert")
    tokenizer = tokenizer_of(tmp_path)
    assert read_by(tokenizer) is spaced
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(" ", "\u2581"), normalizers.Lowercase()])
    alike = read_by(tokenizer)
    assert alike((" A  film ", ("The", "PLOT"))) == alike(("a film", ("the", "plot"))) != alike(("a films", ("the", "plot")))
    made = {alike(row) for row in variants([("good film",), ("Plot",)], 50, seed=0, known={("FILM",), ("Good",)}, alike=alike)}
    assert made and not made & {("film",), ("good",), ("plot",)}
    assert len(made) == len([*variants([("good film",), ("Plot",)], 50, seed=0, known={("FILM",), ("Good",)}, alike=alike)])


def test_texts_are_compared_once_for_all_who_ask(tmp_path):
    """The check before a run, the stage and a sweep's trials: a normalizer takes as long as a tokenizer."""
    write_tokenizer(tmp_path, "bert")
    tokenizer, calls = tokenizer_of(tmp_path), []
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()

    class Counted(type(read_by(tokenizer))):
        def __call__(self, texts):
            calls.append(texts)
            return super().__call__(texts)

    def new(*texts: str) -> list:
        file, alike = Split([(text,) for text in texts], [0] * len(texts), range(len(texts))), read_by(tokenizer)
        return new_texts(file, config, data, config.train, Counted(alike.state, alike.normalizer)).texts

    (tmp_path / "a.tsv").write_text("text\tlabel\ngood film\tno\ndull\tyes\n")
    config = TaskConfig(train=tmp_path / "a.tsv", validation=tmp_path / "a.tsv")
    data = read_task(config)
    assert (
        new("Good  film", "Plot", "a plot", "plot") == new("Good  film", "Plot", "a plot", "plot") == [("Plot",), ("a plot",)]
    )
    assert len(calls) == 2 + 4, "each text of the task and of the file once"
    assert new("Good  film", "Plot", "a plots", "plot") == [("Plot",), ("a plots",)] and len(calls) == 12
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("o", "0")
    assert new("Good  film", "Plot", "a plots", "plot")[0] == ("Good  film",) and len(calls) == 18
    data = replace(data, train=replace(data.train, texts=[("Plot",), ("dull",)]))
    assert new("Good  film", "Plot", "a plots", "plot") == [("Good  film",), ("a plots",), ("plot",)]


def test_one_text_of_a_pair_changes_and_stays_in_its_column():
    for first, second in variants(PAIRS, 20, seed=0):
        assert (first in {row[0] for row in PAIRS}) != (second in {row[1] for row in PAIRS})


def test_they_are_of_the_words_of_their_own_column():
    words = [{word for row in PAIRS for word in row[column].split()} for column in (0, 1)]
    for row in variants(PAIRS, 20, seed=0):
        assert all(set(text.split()) <= own for text, own in zip(row, words, strict=True))


def test_where_spaces_separate_no_words_characters_are_changed():
    assert pieces("这部电影很好") == (list("这部电影很好"), "") and pieces("a  good film") == (["a", "good", "film"], " ")
    made = list(variants([("这部电影很好",), ("剧情无聊",)], 5, seed=0))
    assert made and not any(" " in text for (text,) in made)


def test_each_change_is_what_it_says():
    text, other, draw = "one two three four five six seven eight", "nine ten eleven", random.Random(0)
    words, others = text.split(), other.split()
    for _ in range(50):
        joined = continued(text, other, draw).split()
        kept = next(n for n in range(len(joined), 0, -1) if joined[:n] == words[:n])
        assert joined[kept:] == others[len(others) - (len(joined) - kept) :] and len(joined) > kept
        piece = part(text, other, draw)
        assert piece in text and 2 <= len(piece.split()) <= 6
        rest = iter(words)
        assert all(word in rest for word in shortened(text, other, draw).split()), "in the same order"
        assert all(new in (old, *others) for new, old in zip(mixed(text, other, draw).split(), words, strict=True))


@given(st.lists(st.tuples(TEXT), min_size=1, max_size=4), st.integers(1, 3), st.integers(0, 9))
def test_no_text_is_too_odd(rows, count, seed):
    made = list(variants(rows, count, seed))
    assert len(made) <= count * len(rows) and all(text.strip() for (text,) in made)


@pytest.mark.parametrize("change", CHANGES)
def test_a_text_of_one_character(change):
    assert change("a", "b", random.Random(0)) in ("", "a", "b", "ab")
