"""Texts in, answers out: a python-based Triton backend that tokenizes, computes in one session and names the result.

Requests of text have one shape, so that Triton's dynamic batching merges them. Triton runs this file in its Python stub; it
needs numpy, tokenizers, and the runtime of the model file (onnxruntime or openvino), and the files beside it.
"""

import importlib

import numpy as np
import triton_python_backend_utils as pb_utils
from door import Refused
from text_rows import NotFinite, TextModel, read_inputs
from triton_requests import array_of, drop_cancelled, each_read, error_response, open_engine, read_config, response_of

TASK = "TASK"
"""The last input of a model of many tasks: the name of each row's."""
MOST_TOKENS = 128
"""Padded tokens of a sub-batch where the config has no `max_batch_tokens`."""


class TritonPythonModel:
    """One model instance: one session and one tokenizer."""

    def initialize(self, args):
        """Open the version's model and tokenizer. Raises TritonModelException, shown in Triton's log."""
        config, settings, version, facts = read_config(args)
        self.inputs = [tensor["name"] for tensor in config["input"]]
        self.most_rows = config["max_batch_size"]
        runtime = facts.get("runtime", "")
        if runtime not in ("onnxruntime", "openvino"):
            raise pb_utils.TritonModelException(f"serving.json of version {version.name} is missing or names no known runtime")
        engine_type = importlib.import_module(f"{runtime}_engine").Engine
        self.engine = open_engine(engine_type, args, config, settings, version, facts)
        most_tokens = int(settings.get("max_batch_tokens", MOST_TOKENS))
        try:
            self.model = TextModel(version, facts, self.engine, read_inputs(self.engine.inputs), most_tokens)
        except ValueError as error:
            raise pb_utils.TritonModelException(str(error)) from error

    def execute(self, requests):
        """One response per request, in order. All rows are tokenized and computed together; a bad request fails alone."""
        read, responses = each_read(requests, self.read)
        sizes = [len(rows) for rows in read.values()]
        if sum(sizes) + max(sizes, default=0) > self.most_rows:
            # more may wait, so that callers give up: only then to ask for each costs less than it saves
            drop_cancelled(requests, read, responses)
        rows = [row for request_rows in read.values() for row in request_rows]
        owners = [(index, number) for index, request_rows in read.items() for number in range(len(request_rows))]
        for place, error in self.model.tokenize(rows).items():
            index, number = owners[place]
            responses.setdefault(index, error_response(self.named(error, number, len(read[index])), "tokenizer"))
        good = [place for place, (index, _) in enumerate(owners) if index not in responses]
        answers = dict.fromkeys(read)
        for place, answer in zip(good, self.model.answers([rows[place] for place in good]), strict=True):
            index = owners[place][0]
            answers[index] = [*(answers[index] or ()), answer]
        responses |= {index: self.response(parts) for index, parts in answers.items() if index not in responses}
        return [responses[index] for index in range(len(requests))]

    def finalize(self):
        """Free the model."""
        self.model = self.engine = None

    def read(self, request):
        """The rows of a request. Raises Refused."""
        # PAIR is optional where a model has many tasks
        given = [name for name in self.inputs if pb_utils.get_input_tensor_by_name(request, name) is not None]
        columns = [array_of(request, name).reshape(-1) for name in given]
        if len({len(column) for column in columns}) > 1 or not len(columns[0]):
            raise Refused(f"{' and '.join(given)} must have the same number of rows, at least one")
        rows, texts = [], len(given) - (TASK in given)
        for number, cells in enumerate(zip(*columns, strict=True)):
            try:
                rows.append(self.model.row(cells[:texts], *cells[texts:]))
            except Refused as error:
                raise self.named(error, number, len(columns[0])) from None
        return rows

    def named(self, error, number, count):
        """The error with its row, where the request has several."""
        return type(error)(f"row {number}: {error}") if count > 1 else error

    def response(self, answers):
        """The response from the answers to the rows of a request, one of which may be an error."""
        for number, answer in enumerate(answers):
            if isinstance(answer, NotFinite):
                # with its row also where it is alone: a failure without one need not be because of a row
                return error_response(NotFinite(f"row {number}: {answer}"), self.engine.title)
            if isinstance(answer, Exception):  # of all rows that were computed together
                return error_response(answer, self.engine.title)
        return response_of({name: np.concatenate([answer[name] for answer in answers]) for name in answers[0]})
