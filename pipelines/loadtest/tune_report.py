"""The evidence of a tuning as a table and as Markdown."""

from __future__ import annotations

from typing import Any

from pipelines.reporting.format import markdown, percent, significant
from serving.loadtest.tune.tuned import SHOW_A_PERCENT, within_limit

Record = dict[str, Any]

COLUMNS = ("instances x threads", "delay µs", "tokens", "answers/s", "spread", "clients", "p99 ms")
MOST_ROWS = 12


def setting_rows(evidence: Record, most: int | None = None) -> list[list[str]]:
    """A row for each setting under COLUMNS, best first; the chosen one is marked."""
    return [
        [
            f"{row['instances']} x {row['threads']}{' (chosen)' if row == evidence['chosen'] else ''}",
            *("-" if row[key] is None else str(row[key]) for key in ("max_queue_delay_us", "max_batch_tokens")),
            significant(row["answers_a_second"]) if row["answers_a_second"] else "over the limit",
            "-" if row["spread"] is None else percent(row["spread"]),
            str(row["clients"]),
            significant(row["p99_ms"]),
        ]
        for row in evidence["settings"][:most]
    ]


def conclusions(evidence: Record) -> list[str]:
    """What was chosen, in keys of the stage `deploy`, and what it keeps under random arrivals."""
    chosen, limit = evidence["chosen"], evidence["p99_ms"]
    lines = [f"measured {len(evidence['settings'])} of {evidence['grid']} settings with {evidence['rows']}", as_keys(chosen)]
    if of_texts(chosen):
        size = max(1, round(chosen["answers_a_second"] * limit / 1000 / 4))
        refuse = f"max_queue_size: {size}, timeout_ms: {limit / 4:g}"
        lines.append(
            f"for overload: {{{refuse}}} refuses early what would come late; see it with --rate 2x --deadline {limit:g}"
        )
    return [*lines, f"requests at random times: {_at_random_times(evidence['arrivals'], limit)}"]


def _at_random_times(arrivals: list[Record], limit: float) -> str:
    """The rate that keeps the limit; how many requests did, where these do not show that 99 % of all do."""
    rate = within_limit(arrivals)
    row = next((row for row in arrivals if row["rate"] == rate), arrivals[0])
    requests, in_time = row["requests"], round(row["in_time"] * row["requests"])
    few = requests < SHOW_A_PERCENT
    if rate is None:
        late = f"{requests - in_time} of {requests}" if few else "more than 1 % of them"
        return f"over {limit:g} ms for {late} even at {significant(row['rate'])} a second"
    kept = "99 % are"
    if few or in_time < requests:
        kept = f"{'all' if in_time == requests else in_time} of {requests} were"
    return f"up to {significant(rate)} a second, {kept} answered within {limit:g} ms"


def of_texts(chosen: Record) -> bool:
    """Whether a setting is one of a model of texts: tokens of a batch are a knob of it alone."""
    return chosen["max_batch_tokens"] is not None


def as_keys(chosen: Record) -> str:
    """A setting in keys of the stage `deploy`, which gives a model of tokens no dynamic batching."""
    keys = ("instances", "threads", *(("max_queue_delay_us", "max_batch_tokens") if of_texts(chosen) else ()))
    line = f"deploy: {{{', '.join(f'{key}: {chosen[key]}' for key in keys if chosen[key] is not None)}}}"
    delay = chosen["max_queue_delay_us"]
    if delay is None:
        return f"{line}, without dynamic batching"
    return line if of_texts(chosen) else f"{line}, and by this config.pbtxt alone dynamic batching with a delay of {delay} µs"


def to_markdown(evidence: Record) -> str:
    """The evidence as a page, on which no name of a model or file becomes markup."""
    evidence = evidence | {name: markdown(evidence[name]) for name in ("model", "rows")}
    title = f"# Settings of {evidence['model']} for a p99 latency of {evidence['p99_ms']:g} ms on {evidence['cores']} cores"
    rows = [COLUMNS, ["---"] + ["--:"] * (len(COLUMNS) - 1), *setting_rows(evidence)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"{title}\n\n{table}\n\n" + "\n".join(f"- {line}" for line in conclusions(evidence)) + "\n"
