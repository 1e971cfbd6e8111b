"""The kinds of tasks and all their differences, one object per kind: `kind_of("regression")`.

A new kind is a file in `kinds/` with a `KIND` row, and a name in `KINDS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor.errors import UserError
from compressor.models.build import GENERATES, GENERATIVE, SEQUENCES, TOKENS
from compressor.tasks import KINDS, TaskConfig
from compressor.tasks.features import encode
from compressor.tasks.listing import cell_shown
from compressor.tasks.metrics import Resampled, difference_interval, interval
from compressor.tasks.rows import Labels, Split

if TYPE_CHECKING:
    from tokenizers import Encoding
    from torch import Tensor, nn
    from transformers import PretrainedConfig

Example = tuple[tuple[Any, ...], Any]
"""The texts of a row, one per column (text, or a tuple of words), and its label."""
Column = Sequence[tuple[int, Any]]
"""(line, label) of every row of a file."""


@dataclass(frozen=True)
class Metric:
    """A quality metric. Larger is better, unless it `falls`: such a one can be a main metric only if it is of texts.

    `value` takes the two arrays (rows, ...) that the kind's `metric_inputs` computes from outputs and labels. `key` names it
    in metadata, `name` in sentences; it is shown times `scale`, followed by `unit`, and in a summary with `aside`, the same in
    other words. `note` is an explanation for readers of a report. `chance` is the value of a constant prediction for every
    row, if a trained model cannot have the same value. `of_class`: it judges one of two classes, whose index `value` takes as
    `positive`. `grain` is the kind's, for this metric. `of_texts`: `value` takes the figures of generated texts
    (`TextMetric.statistics`), so it is measured only where texts are generated. `resampled`: what draws of rows are measured by
    for intervals, if `value` is biased or slow there (`metrics.Resampled`). `by_degree`: it depends on how far outputs are off,
    as a correlation or a likelihood does, and not on which are right alone.
    """

    key: str
    name: str
    value: Callable[[np.ndarray, np.ndarray], float]
    unit: str = ""
    aside: Callable[[float], str] = lambda value: ""
    note: str = ""
    chance: float | None = None
    of_class: bool = False
    falls: bool = False
    grain: Callable[[np.ndarray], float] | None = None
    scale: float = 100.0
    of_texts: bool = False
    resampled: Resampled | None = None
    by_degree: bool = False

    @property
    def times(self) -> str:
        """'× 100' where a reader would not expect values to be shown times 100, otherwise empty."""
        return "" if self.unit or self.of_texts else "× 100"


@dataclass(frozen=True)
class Agreement:
    """Agreement of two models' predictions, whatever the labels are.

    `measure` takes two arrays of outputs (predictions, outputs) and returns 1.0 if they agree completely; the required values
    are in export/parity/bounds.py. `name` is the heading of a column, `words` precede the share in a sentence. `chance` of (a
    share, predictions) is the sampling error of that share on so many predictions. `beyond` is `measure` without the
    predictions that rounding noise of their margins alone may flip. `softmax`: whether the outputs of one prediction are
    logits of one softmax, for which a constant added to all of them is no change.
    """

    measure: Callable[[np.ndarray, np.ndarray], float]
    name: str
    words: str
    chance: Callable[[float, int], float]
    beyond: Callable[[np.ndarray, np.ndarray, float], float]
    softmax: bool = True


def require_text(name: str, text: object, where: str) -> None:
    """Raises UserError E206 for a cell of the column `name` that holds no text."""
    if not isinstance(text, str) or not text.strip():
        raise UserError("E206", f"column '{name}' holds {cell_shown(text)}, not text", "Fill it or drop the row", where)


def text_cells(row: Mapping[str, Any], task: TaskConfig, path: Path, line: int) -> tuple[str, ...]:
    """The texts of a row, one per column. Raises UserError E206."""
    texts = tuple(row[name] for name in task.text_columns)
    for name, text in zip(task.text_columns, texts, strict=True):
        require_text(name, text, f"{path}:{line}")
    return texts


@dataclass(frozen=True)
class TaskKind:
    """One kind of task.

    - `example`: (a row's cells, the task, its file and line) -> its texts and its label; raises UserError E206, E207, E214;
    - `outputs`: (task, the training labels) -> the names of the model's outputs; raises UserError E208;
    - `targets`: (file, its labels, the outputs' names) -> what loss and metrics take; raises UserError E208, E209;
    - `lacks`: (targets of a part of the rows, the outputs' names) -> what is missing for a training on it, or None;
    - `start`: (model, training targets) -> None: initializes a fresh task head;
    - `loss`: (outputs as the model gives them, labels (rows, ...), reduction over rows "mean" or "sum") -> a scalar;
    - `distillation`: (student's outputs, teacher's outputs, labels) -> a scalar, the mean over rows;
    - `smooths`: whether both take a `label_smoothing`;
    - `imitation`: the same by the teacher's outputs alone: `labels` only mark where the model predicts;
    - `texts`: (a row's cells, the task, its file and line) -> its texts; raises UserError E206;
    - `placeholder`: the texts of a row without labels -> what stands for its label;
    - `pair`: the task -> whether the model reads pairs of texts;
    - `sentences`: how many of the text columns must hold more than numbers;
    - `truncates`: whether rows longer than `max_length` are cut, and not refused;
    - `least_tokens`: (tokenizer, split) -> the least `max_length` of each row that is cut, but refused where that cuts off what
      it is about; [] where nothing is refused;
    - `refuses_tokens`: whether `encode` may raise UserError for a row: all are then tokenized before a run writes anything;
    - `classes`: a valid cell of the label column -> the classes that it names, which must all be written alike (E235);
    - `augments`: whether a text with other words is still a row of the kind: it holds no marks, and no label belongs to a word;
    - `shares_base`: whether a model of several `tasks` may have one of this kind, beside others of the same `auto_class`;
    - `metrics`: the first is the one for checks, intervals and reports, unless a task chooses another;
    - `further`: metrics that are measured, too, where a task chooses its metric: all are made of `metric_inputs`, but those
      of generated texts;
    - `predicted_labels`: outputs -> the labels that the model itself predicts;
    - `prediction`: (the outputs' names, one row of outputs, the text and its `tokenizers.Encoding`) -> the prediction for a
      client, a dataclass printed by `str`; raises UserError E717;
    - `written`: a client's text in the form of the training texts; raises UserError E717;
    - `auto_class`: transformers' Auto class of the model (`compressor.models.build`);
    - `problem_type`: that of the model's config, where the number of outputs does not tell it: transformers chooses loss and
      the scores of its own pipelines by it;
    - `encode`: (tokenizer, split, task, file) -> tokens and labels (rows, ...), which mark where the model predicts
      (`compressor.tasks.predictions`); raises UserError E213;
    - `grain`: labels (rows, ...) -> how far one prediction can move the main metric;
    - `gates`: the metric whose loss is bounded, if that is not the main one;
    - `spread`: (targets, the outputs' names) -> how labels are distributed, figures by name;
    - `constant`: targets -> the best value of the first metric for a constant prediction, None if undefined;
    - `constant_of`: (another main metric, targets) -> the same for that one;
    - `with_texts`: (the kind, tokenizer, split) -> the kind for the rows of this file, where its metrics compare texts;
    - `metric_inputs`: (outputs (predictions, outputs), labels (rows, ...)) -> two arrays (rows, ...) for the metrics, so
      that rows can be resampled; its result for a row does not depend on the others;
    - `decided`: the first of these arrays -> what its metrics read of it, and take in its place: where that is equal, a row
      counts the same.
    """

    name: str
    example: Callable[[Mapping[str, Any], TaskConfig, Path, int], Example]
    outputs: Callable[[TaskConfig, list], list[str]]
    targets: Callable[[Path, Column, list[str]], Labels]
    lacks: Callable[[Labels, list[str]], str | None]
    start: Callable[[nn.Module, Labels], None]
    loss: Callable[..., Tensor]
    distillation: Callable[..., Tensor]
    imitation: Callable[[Tensor, Tensor, Tensor], Tensor]
    metrics: tuple[Metric, ...]
    agreement: Agreement
    predicted_labels: Callable[[np.ndarray], np.ndarray]
    prediction: Callable[[Sequence[str], np.ndarray, str, Encoding], Any]
    texts: Callable[[Mapping[str, Any], TaskConfig, Path, int], tuple[Any, ...]] = text_cells
    written: Callable[[Any], Any] = lambda text: text
    placeholder: Callable[[tuple[Any, ...]], Any] = lambda texts: 0
    pair: Callable[[TaskConfig], bool] = lambda task: len(task.text_columns) == 2
    sentences: int = 2
    truncates: bool = True
    least_tokens: Callable[[Any, Split], list[int]] = lambda tokenizer, split: []
    refuses_tokens: bool = True
    classes: Callable[[Any], list] = lambda cell: []
    augments: bool = False
    shares_base: bool = False
    auto_class: str = SEQUENCES
    problem_type: str | None = None
    grain: Callable[[np.ndarray], float] = lambda labels: 1 / len(labels)
    spread: Callable[[Labels, list[str]], dict[str, float]] = lambda labels, names: {}
    constant: Callable[[Labels], float | None] = lambda labels: None
    encode: Callable[..., tuple[list[dict[str, list[int]]], np.ndarray]] = encode
    metric_inputs: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]] = lambda outputs, labels: (outputs, labels)
    decided: Callable[[np.ndarray], np.ndarray] = lambda inputs: inputs
    with_texts: Callable[[TaskKind, Any, Split], TaskKind] = lambda kind, tokenizer, split: kind
    gates: Metric | None = None
    smooths: bool = False
    further: tuple[Metric, ...] = ()
    constant_of: Callable[[Metric, Labels], float | None] = lambda metric, labels: None

    @property
    def metric(self) -> Metric:
        """The kind's main metric."""
        return self.metrics[0]

    @property
    def output_metric(self) -> Metric:
        """The first metric of outputs: the main one, unless that is of generated texts."""
        return next(metric for metric in self.metrics if not metric.of_texts)

    @property
    def gate(self) -> Metric:
        """The metric whose loss is bounded when the precision changes."""
        return self.gates or self.output_metric

    @property
    def generates(self) -> bool:
        """Whether outputs are scores of a vocabulary: too many to be stored for the rows of a split."""
        return self.auto_class in GENERATIVE

    @property
    def continues(self) -> bool:
        """Whether a label is a text that follows the row's own in one sequence."""
        return self.auto_class == GENERATES

    @property
    def unlabelled(self) -> TaskKind:
        """The same kind for rows without labels: the only loss is the distance from the teacher."""
        return replace(self, distillation=self.imitation, loss=lambda outputs, labels, reduction="mean": 0 * outputs.sum())

    def with_smoothing(self, share: float) -> TaskKind:
        """The same kind with labels smoothed in the loss: `share` of their probability is spread evenly over all classes."""
        losses = {name: partial(getattr(self, name), label_smoothing=share) for name in ("loss", "distillation")}
        return replace(self, **losses)

    @property
    def choices(self) -> list[Metric]:
        """The metrics that a task may choose as its main one."""
        return [metric for metric in (*self.metrics, *self.further) if metric.of_texts or not metric.falls]

    def with_metric(self, key: str, positive: int = 1, binary: bool = True) -> TaskKind:
        """The same kind with another main metric, and all others beside it; those of one class only where the task is `binary`,
        for the class of index `positive`."""
        offered = [metric for metric in (*self.metrics, *self.further) if binary or not metric.of_class]
        bound = [replace(one, value=partial(one.value, positive=positive)) if one.of_class else one for one in offered]
        main = next(metric for metric in bound if metric.key == key)
        return replace(
            self,
            metrics=(main, *(metric for metric in bound if metric is not main)),
            further=(),
            constant=self.constant if key == self.metric.key else partial(self.constant_of, main),
            grain=main.grain or self.grain,
        )

    def finite_inputs(self, outputs: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`metric_inputs` of a trained model's outputs. Raises UserError E406 where these are not finite: a metric would take
        them for the first class, and score as well as that occurs."""
        if wrong := int((~np.isfinite(outputs)).sum()):
            what = (
                f"the trained model's outputs hold {wrong:,} of {outputs.size:,} numbers that are not finite (NaN or infinity)"
            )
            raise UserError("E406", what, "Train again at a lower learning_rate, e.g. a third of it")
        return self.metric_inputs(outputs, labels)

    def quality(self, predicted: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
        """Every metric of the arrays from `metric_inputs`, the first with its 95 % bootstrap interval, as recorded in metadata
        and reports."""
        main, measured = self.output_metric, [metric for metric in self.metrics if not metric.of_texts]
        values = {metric.key: metric.value(predicted, labels) for metric in measured}
        return {
            main.key: values.pop(main.key),
            "interval": list(interval(main.value, self.decided(predicted), labels, resampled=main.resampled)),
            **values,
            "rows": len(labels),
        }

    def unlearnt(self, quality: Mapping[str, Any]) -> bool:
        """Whether a quality equals that of one constant prediction. (Where all labels are equal, nothing can be better.)"""
        return any(metric.chance is not None and quality.get(metric.key) == metric.chance for metric in self.metrics)

    def change(self, candidate: np.ndarray, reference: np.ndarray, labels: np.ndarray, **options: int) -> tuple[float, float]:
        """95 % paired bootstrap interval over rows of the change of `output_metric` between the `metric_inputs` of two models;
        options of `difference_interval`."""
        main, sides = self.output_metric, map(self.decided, (candidate, reference))
        return difference_interval(main.value, *sides, labels, resampled=main.resampled, **options)


def one_label(read: Callable[[object], Any], valid: str, fix: str) -> Callable[..., Example]:
    """The `example` function of a kind with one label per row. `read`: a cell of its column -> the label, None if invalid;
    `valid` describes a valid label, `fix` how to write it."""

    def example(row: Mapping[str, Any], task: TaskConfig, path: Path, line: int) -> Example:
        texts = text_cells(row, task, path, line)
        label = read(row[task.label])
        if label is None:
            what = f"column '{task.label}' holds {cell_shown(row[task.label])}, not {valid}"
            raise UserError("E207", what, fix, f"{path}:{line}")
        return texts, label

    return example


def kind_of(name: str) -> TaskKind:
    """The kind with this name. Raises ValueError for an unknown name."""
    if name not in KINDS:
        raise ValueError(f"no kind of task is called {name!r}")
    return importlib.import_module(f"compressor.tasks.kinds.{name}").KIND


def kind_for(task: TaskConfig, names: Sequence[str] | None = None) -> TaskKind:
    """The kind of a task with the metric that the task chooses, among the labels `names` of its training rows.

    Without `names` metrics have their names, but not their positive class. Raises UserError E119 for a metric that the kind
    lacks, or of texts that the task does not generate or score by it; E217 for one of two classes where there are others, E218
    for an unknown positive class.
    """
    kind = kind_of(task.kind)
    key, choices = task.metric or kind.metric.key, {metric.key: metric for metric in kind.choices}
    if key not in choices:
        raise UserError("E119", f"{key!r:.60} is not a metric of a {task.kind}", f"Metrics: {', '.join(choices)}", key="metric")
    if choices[key].of_texts and (task.decode is None or key not in task.decode.metrics):
        fix = f"Add it to metrics of decode: {{metrics: [{key}]}}"
        raise UserError("E119", f"the metric {key} is of generated texts, and decode does not compute it", fix, key="metric")
    if task.positive is not None and not choices[key].of_class:
        used = [metric.key for metric in choices.values() if metric.of_class]
        fix = "Remove positive" + (f", or choose metric {' or '.join(used)}" if used else "")
        raise UserError("E119", f"positive is not used by the metric {key}", fix, key="positive")
    if task.metric is None:
        return kind
    if names is None:
        return kind.with_metric(key)
    if choices[key].of_class and len(names) != 2:
        fix = f"Choose another metric: {', '.join(name for name, metric in choices.items() if not metric.of_class)}"
        raise UserError("E217", f"metric {key} is of two classes, and training has {len(names)}", fix)
    if task.positive is not None and str(task.positive) not in names:
        raise UserError("E218", f"no class is called '{task.positive!s:.60}', as positive says", f"Classes: {', '.join(names)}")
    positive = 1 if task.positive is None else list(names).index(str(task.positive))
    return kind.with_metric(key, positive, binary=len(names) == 2)


def kind_shown(auto_class: str, outputs: int) -> str:
    """The name of the kind that a model which predicts labels is taken for by its task head alone."""
    return "tokens" if auto_class == TOKENS else kind_with(outputs).name


def kind_recorded(kind: TaskKind, outputs: int) -> str:
    """What a model's file records of its kind of task: its name where the head would be taken for another kind, else ''."""
    return "" if kind.generates or kind.name == kind_shown(kind.auto_class, outputs) else kind.name


def set_problem_type(config: PretrainedConfig, recorded: str) -> None:
    """Complete the config of a model by the kind that its file records (`kind_recorded`), which its outputs do not tell."""
    if recorded in KINDS and (problem_type := kind_of(recorded).problem_type):
        config.problem_type = problem_type


def kind_of_head(config: PretrainedConfig, outputs: int) -> TaskKind:
    """The kind of a sequence model by its config, which tells independent labels, and its number of outputs."""
    independent = next(kind for kind in map(kind_of, KINDS) if kind.problem_type)
    return independent if config.problem_type == independent.problem_type else kind_with(outputs)


def kind_with(outputs: int) -> TaskKind:
    """The kind of a sequence model by its number of outputs, where nothing else is known: a single output is a regression."""
    return kind_of("regression" if outputs == 1 else "classification")
