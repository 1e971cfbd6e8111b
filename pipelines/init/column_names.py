"""Usual column names of data sets, the most likely first."""

from __future__ import annotations

LABELS = (
    *("label", "labels", "gold_label", "class", "category", "sentiment", "intent", "topic"),
    *("score", "similarity", "rating", "stars", "grade", "target", "y"),
)
PAIRS = (
    *(("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("question", "sentence")),
    *(("text1", "text2"), ("text_a", "text_b"), ("sentence_a", "sentence_b"), ("first", "second")),
    *(("question", "passage"), ("question", "context"), ("question", "document"), ("question", "answer")),
    *(("query", "passage"), ("query", "document"), ("claim", "evidence"), ("text", "hypothesis")),
)
TEXTS = ("sentence", "text", "review", "content", "body", "comment", "tweet", "message", "utterance", "document", "question")
PROMPTS = (
    *(("prompt", "target"), ("prompt", "completion"), ("prompt", "response"), ("instruction", "output")),
    *(("instruction", "response"), ("question", "answer"), ("source", "target"), ("input", "output")),
    *(("document", "summary"), ("article", "summary"), ("dialogue", "summary"), ("mr", "ref")),
)
WORDS, TAGS = ("tokens", "words"), ("tags", "ner_tags", "labels", "ner")

COLUMN_NAMES = frozenset([*LABELS, *TEXTS, *WORDS, *TAGS, *(name for pair in (*PAIRS, *PROMPTS) for name in pair)])
