"""Bodies of requests and responses, as the OpenAPI page shows them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator


def in_unicode(text: str) -> str:
    """The text. Raises ValueError for half of a surrogate pair, which JSON can hold and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("not valid Unicode") from None
    return text


Text = Annotated[str, Field(max_length=1_000_000), AfterValidator(in_unicode)]
Name = Annotated[str, AfterValidator(in_unicode)]
MOST_TEXTS = 1000


class PredictRequest(BaseModel):
    """Texts, or pairs of texts, for one model."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"texts": ["a fine film", "a dull one"]}})

    texts: list[Text] = Field(min_length=1, max_length=MOST_TEXTS)
    pairs: list[Text] | None = Field(default=None, description="the second text of each, for a model of pairs")
    model: Name | None = Field(default=None, description="name of a served model; default the only one")
    task: Name | None = Field(default=None, description="name of the task, for a model of many")


class Span(BaseModel):
    """One word and its tag; `start` and `end` are characters of the text."""

    start: int
    end: int
    text: str
    tag: str


class Prediction(BaseModel):
    """What a model says of one text: a label or several with every score, a number, tags, or an answer."""

    label: str | None = None
    score: float | None = None
    labels: list[str] | None = None
    scores: dict[str, float] | None = None
    value: float | None = None
    entities: list[Span] | None = None
    answer: str | None = Field(default=None, description="words of the second text; empty for no answer")
    start: int | None = None
    end: int | None = None


class PredictResponse(BaseModel):
    """In the order of the texts."""

    model: str
    predictions: list[Prediction]


class RerankRequest(BaseModel):
    """A query and documents, in the shape of Cohere's API; keys that are not used here are accepted."""

    model_config = ConfigDict(
        extra="ignore", json_schema_extra={"example": {"model": "sts", "query": "a cat", "documents": ["a kitten", "a car"]}}
    )

    model: Name | None = Field(default=None, description="name of a served model that gives one number for a pair")
    query: Text
    documents: list[Text | dict[str, Any]] = Field(min_length=1, max_length=MOST_TEXTS)
    top_n: int | None = Field(default=None, ge=1)
    return_documents: bool = False

    @model_validator(mode="after")
    def _documents_in_unicode(self) -> RerankRequest:
        for text in self.texts:
            in_unicode(text)
        return self

    @property
    def texts(self) -> list[str]:
        """The documents as texts; an object is its `text`, or its values joined by spaces."""
        return [
            document
            if isinstance(document, str)
            else str(document["text"])
            if "text" in document
            else " ".join(map(str, document.values()))
            for document in self.documents
        ]


class Ranked(BaseModel):
    """A document by its place in the request."""

    index: int
    relevance_score: float
    document: dict[str, str] | None = None


class RerankResponse(BaseModel):
    """Documents by falling score; equal scores in the order of the request."""

    id: str
    results: list[Ranked]
    meta: dict[str, Any]


class Problem(BaseModel):
    """One error: what is wrong and how to fix it."""

    code: str
    message: str
