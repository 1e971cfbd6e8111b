"""Quality metrics of outputs against labels, with confidence intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

RESAMPLES = 2000


def _classes(outputs: np.ndarray) -> np.ndarray:
    """The predicted classes (rows,): those of the largest logits (rows, classes), or already given as such."""
    return outputs.argmax(axis=1) if outputs.ndim > 1 else outputs


def accuracy(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Share of rows whose predicted class is the label. `outputs` are logits (rows, classes) or the predicted classes (rows,),
    here and in all metrics of classes; `labels` (rows,)."""
    return float((_classes(outputs) == labels).mean())


def matthews(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Matthews correlation of predictions and labels in [-1, 1], for any number of classes (Gorodkin 2004); 0 where one of them
    is constant. CoLA's metric: always predicting the larger class scores 0.
    """
    given = _classes(outputs)
    classes = 1 + max(given.max(), labels.max())
    # from the sums of the table of all pairs of classes, which is large where there are many
    true, predicted = (np.bincount(numbers, minlength=classes) * 1.0 for numbers in (labels, given))
    right, rows = float((given == labels).sum()), float(len(labels))
    covariance = right * rows - true @ predicted
    spread = (rows**2 - true @ true) * (rows**2 - predicted @ predicted)
    return float(covariance / np.sqrt(spread)) if spread else 0.0


def _f1_by_class(outputs: np.ndarray, labels: np.ndarray, last: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """F1 of every class up to the last that occurs, or to `last`: 2 right / (predicted + true), 0 where nothing is right; and
    whether it occurs at all."""
    predicted = _classes(outputs)
    classes = 1 + max(predicted.max(), labels.max(), last)
    right = np.bincount(labels[predicted == labels], minlength=classes)
    either = np.bincount(predicted, minlength=classes) + np.bincount(labels, minlength=classes)
    return 2 * right / np.maximum(either, 1), either > 0


def f1(outputs: np.ndarray, labels: np.ndarray, positive: int = 1) -> float:
    """F1 of the class `positive`, by default the second of two; 0 where it is neither predicted nor true (scikit-learn's)."""
    return float(_f1_by_class(outputs, labels, positive)[0][positive])


def macro_f1(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Mean F1 of the classes that are predicted or true in these rows (scikit-learn's `average="macro"`)."""
    by_class, occurs = _f1_by_class(outputs, labels)
    return float(by_class[occurs].mean())


def accuracy_and_f1(outputs: np.ndarray, labels: np.ndarray, positive: int = 1) -> float:
    """Mean of accuracy and F1: GLUE's figure for MRPC and QQP."""
    return (accuracy(outputs, labels) + f1(outputs, labels, positive)) / 2


def labels_agree(reference: np.ndarray, candidate: np.ndarray) -> float:
    """Share of rows in which two arrays of logits (rows, classes) have the same argmax."""
    return float((reference.argmax(axis=1) == candidate.argmax(axis=1)).mean())


def margins(reference: np.ndarray, candidate: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays of logits (rows, classes) -> two of margins (rows,): the reference's margin between its first and second
    class, which is never negative, and the candidate's margin between the same two classes.
    """
    second, first = np.argpartition(reference, -2, axis=1)[:, -2:].T
    rows = np.arange(len(reference))
    return reference[rows, first] - reference[rows, second], candidate[rows, first] - candidate[rows, second]


def margin_noise(reference: np.ndarray, candidate: np.ndarray) -> float:
    """Standard deviation of the change of `margins`, estimated by its median: robust to a few rows that change much."""
    before, after = margins(reference, candidate)
    return float(1.4826 * np.median(np.abs(after - before)))


NOISES = 2
"""A label is undecided if the reference's margin is at most this many standard deviations of the rounding noise."""


def decided_labels_agree(reference: np.ndarray, candidate: np.ndarray, noise: float) -> float:
    """`labels_agree`, where rows within NOISES x `noise` (of the margin) of the decision boundary count as agreeing: there
    rounding alone flips labels, correct ones as often as wrong ones."""
    turned = reference.argmax(axis=1) != candidate.argmax(axis=1)
    return float(1 - (turned & (margins(reference, candidate)[0] > NOISES * noise)).mean())


def output_distance(reference: np.ndarray, candidate: np.ndarray, *, softmax: bool) -> float:
    """Distance of two arrays of outputs (predictions, outputs): rms of the change over the spread of the reference.

    Logits of one `softmax` are compared up to a constant per prediction, which it ignores: for two classes this is the rms
    change of the margin over the margin's standard deviation. 0 where nothing changes; infinite where the reference is
    constant.
    """
    reference, candidate = (values.astype(np.float64) for values in (reference, candidate))
    if softmax and reference.shape[1] > 1:
        reference, candidate = (values - values.mean(axis=1, keepdims=True) for values in (reference, candidate))
    change, spread = np.square(candidate - reference).mean(), np.square(reference - reference.mean(axis=0)).mean()
    return float(np.sqrt(change / spread)) if spread else (np.inf if change else 0.0)


def two_errors(share: float, predictions: int) -> float:
    """Two standard errors of a share measured on so many predictions."""
    return 2 * float(np.sqrt(share * (1 - share) / predictions))


def entity_starts(tags: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the first and of the last word of every entity, in order.

    `tags` (words,) are 0 outside, 2k + 1 at the beginning of an entity of type k, 2k + 2 inside; `rows` (words,) are the
    numbers of their sentences. An I- tag that does not follow its own type begins an entity (conlleval; seqeval's default).
    """
    types, inside = (tags - 1) // 2, tags > 0
    continues = np.zeros(len(tags), dtype=bool)  # continued from the previous word
    continues[1:] = inside[1:] & inside[:-1] & (tags[1:] % 2 == 0) & (types[1:] == types[:-1]) & (rows[1:] == rows[:-1])
    followed = np.append(continues[1:], False)
    return np.flatnonzero(inside & ~continues), np.flatnonzero(inside & ~followed)


def entity_f1(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Micro F1 of entities, 2 right / (predicted + true); 0 without any entity. Arguments: `tokens.metric_inputs`."""
    right, entities, _ = predicted.sum(axis=0)
    return float(2 * right / max(entities + labels[:, 0].sum(), 1))


def word_accuracy(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Share of words with the right tag. Arguments: `tokens.metric_inputs`."""
    return float(predicted[:, 2].sum() / labels[:, 1].sum())


LEAST = -700.0
"""Lowest log-likelihood of a token: its exp and inverse are still finite."""


def log_likelihood(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Mean log-likelihood per token, in nats; at least LEAST, also for NaN. Arguments: `generation.metric_inputs`."""
    return float(np.fmax(predicted[:, 0].sum() / labels.sum(), LEAST))


def likelihood(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Geometric mean over tokens of their predicted probability: 1 / perplexity. Arguments as for `log_likelihood`."""
    return float(np.exp(log_likelihood(predicted, labels)))


def perplexity(predicted: np.ndarray, labels: np.ndarray) -> float:
    """exp of the mean negative log-likelihood; 1 is the minimum. Arguments as for `log_likelihood`."""
    return float(np.exp(-log_likelihood(predicted, labels)))


def token_accuracy(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Share of tokens that are the most likely next token. Arguments as for `log_likelihood`."""
    return float(predicted[:, 1].sum() / labels.sum())


def pearson(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Correlation in [-1, 1] of outputs (rows, 1) with labels (rows,); 0 where undefined: one is constant, or NaN."""
    return _correlation("pearsonr", outputs, labels)


def spearman(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Spearman correlation: `pearson` of the ranks; equal values share their mean rank."""
    return _correlation("spearmanr", outputs, labels)


def pearson_and_spearman(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Mean of both correlations: GLUE's figure for STS-B."""
    return (pearson(outputs, labels) + spearman(outputs, labels)) / 2


def spearman_of_draws(outputs: np.ndarray, labels: np.ndarray) -> OfRows:
    """`spearman` on draws of these rows, in a tenth of its time: values are sorted once, and not in every draw. The same to the
    last bit up to 300,000 rows, where all sums are exact, as ranks are multiples of 1/2."""
    orders = [np.unique(values, return_inverse=True)[1] for values in (outputs[:, 0], labels)]
    finite = np.isfinite(outputs[:, 0]) & np.isfinite(labels)

    def of_draw(rows: np.ndarray) -> float:
        ranks = [_ranks(order[rows]) for order in orders]
        defined = finite[rows].all() and all(np.ptp(values) > 0 for values in ranks)
        return float(np.corrcoef(*ranks)[1, 0]) if defined else 0.0

    return of_draw


def _ranks(order: np.ndarray) -> np.ndarray:
    """Ranks from 1 of values (rows,), given as numbers from 0 in the same order; equal ones share their mean rank."""
    counts = np.bincount(order)
    return (counts.cumsum() - (counts - 1) / 2)[order]


def pearson_and_spearman_of_draws(outputs: np.ndarray, labels: np.ndarray) -> OfRows:
    """`pearson_and_spearman` on draws of these rows."""
    ranked = spearman_of_draws(outputs, labels)
    return lambda rows: (pearson(outputs[rows], labels[rows]) + ranked(rows)) / 2


def _correlation(name: str, outputs: np.ndarray, labels: np.ndarray) -> float:
    """A correlation of scipy's, 0 where it is not defined."""
    from scipy import stats  # imported here: it would dominate the time of checking a pipeline file

    outputs, labels = (values.astype(np.float64) for values in (outputs[:, 0], labels))
    if not all(np.isfinite(values).all() and np.ptp(values) > 0 for values in (outputs, labels)):
        return 0.0
    return float(getattr(stats, name)(outputs, labels).statistic)


def concordance(reference: np.ndarray, candidate: np.ndarray) -> float:
    """Lin's concordance of two arrays of outputs (rows, 1): 2 cov / (var + var + (difference of means)²), in [-1, 1].

    1 only where both are equal: unlike a correlation, it also decreases with offset and scale (Lin 1989).
    """
    reference, candidate = (values[:, 0].astype(np.float64) for values in (reference, candidate))
    if np.array_equal(reference, candidate):
        return 1.0
    apart = reference.var() + candidate.var() + (reference.mean() - candidate.mean()) ** 2
    return float(2 * ((reference - reference.mean()) * (candidate - candidate.mean())).mean() / apart)


def _draws(rows: int, count: int, seed: int) -> Iterator[np.ndarray]:
    """Row numbers of `count` resamples with replacement."""
    generator = np.random.default_rng(seed)
    return (generator.integers(0, rows, size=rows) for _ in range(count))


def _middle(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


Measure = Callable[[np.ndarray, np.ndarray], float]
OfRows = Callable[[np.ndarray], float]
"""The numbers of the rows of a draw (rows,) -> its measure."""
Resampled = Callable[[np.ndarray, np.ndarray], OfRows]
"""All rows' outputs and labels -> the measure of draws from them, which equals the metric where all rows are drawn."""

FEWEST = 6
"""Rows that move a metric from which a difference can be shown: where k rows do, all for the better or all for the worse, the
sign test has p = 2 / 2^k, which is 0.06 for 5. A bootstrap calls it shown from 4 on, and of one row always."""
MOST_TRIED = 1000
"""Of more rows that changed so many are tried, evenly spread: a row takes two values of the metric, as many as a draw of the
bootstrap, and that of 20,000 would take ten times as long."""


def interval(
    metric: Measure, outputs: np.ndarray, labels: np.ndarray, seed: int = 0, resampled: Resampled | None = None
) -> tuple[float, float]:
    """95 % percentile bootstrap interval of a metric over rows; `resampled` if draws need another measure than the metric."""
    measure = _of_draws(metric, outputs, labels, resampled)
    return _middle([measure(rows) for rows in _draws(len(labels), RESAMPLES, seed)])


def _of_draws(metric: Measure, outputs: np.ndarray, labels: np.ndarray, resampled: Resampled | None) -> OfRows:
    """The measure of draws of these rows: that of `resampled`, else the metric."""
    return resampled(outputs, labels) if resampled else lambda rows: metric(outputs[rows], labels[rows])


def difference_interval(
    metric: Measure,
    candidate: np.ndarray,
    reference: np.ndarray,
    labels: np.ndarray,
    **options: Any,
) -> tuple[float, float]:
    """95 % paired bootstrap interval of metric(candidate) - metric(reference); options of `paired_changes`. It holds 0 where
    `few_rows_move` it."""
    low, high = _middle(paired_changes(metric, candidate, reference, labels, **options))
    if low <= 0 <= high or not few_rows_move(metric, candidate, reference, labels):
        return low, high
    return min(low, 0.0), max(high, 0.0)


def few_rows_move(metric: Measure, candidate: np.ndarray, reference: np.ndarray, labels: np.ndarray) -> bool:
    """Whether fewer than FEWEST rows move a metric: too few to tell two models apart.

    A row does if it changes the value of one of the two models to have the other's outputs for it. One that turns from a wrong
    class to another does not move the accuracy. Those where the arrays differ are tried one by one until there are enough: all,
    or MOST_TRIED of them, and where fewer than FEWEST of so many move it, nothing is shown, either.
    """
    rows = np.flatnonzero((candidate != reference).reshape(len(labels), -1).any(axis=1))
    if len(rows) < FEWEST:
        return True
    count = min(len(rows), MOST_TRIED)
    tried = rows[np.arange(count) * len(rows) // count]
    pairs = ((candidate, reference), (reference, candidate))
    sides = [(own.copy(), other, metric(own, labels)) for own, other in pairs]

    def moves(row: int) -> bool:
        return any(_with_row(metric, own, other, labels, row) != value for own, other, value in sides)

    return len(list(islice(filter(moves, tried), FEWEST))) < FEWEST


def _with_row(metric: Measure, own: np.ndarray, other: np.ndarray, labels: np.ndarray, row: int) -> float:
    """A metric of outputs whose `row` is another's. `own` is changed meanwhile: a copy for each row would cost more."""
    before = own[row].copy()
    own[row] = other[row]
    value = metric(own, labels)
    own[row] = before
    return value


def paired_changes(
    metric: Measure,
    candidate: np.ndarray,
    reference: np.ndarray,
    labels: np.ndarray,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
    resampled: Resampled | None = None,
) -> np.ndarray:
    """metric(candidate) - metric(reference) on `resamples` draws of the rows with replacement, (resamples,): both are computed
    on the same draws. `resampled` as for `interval`."""
    if np.array_equal(candidate, reference):
        return np.zeros(resamples)
    theirs, ours = (_of_draws(metric, outputs, labels, resampled) for outputs in (candidate, reference))
    return np.array([theirs(rows) - ours(rows) for rows in _draws(len(labels), resamples, seed)])
