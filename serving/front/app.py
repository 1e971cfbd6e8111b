"""The front as an ASGI application: /predict, /v2/rerank in the shape of Cohere's API, health, metrics, and an OpenAPI page.

It has no state: any number of fronts may stand before one Triton, and one may be stopped at any time.
"""

from __future__ import annotations

import hmac
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from compressor.errors import CompressError, UserError
from serving.front.shapes import PredictRequest, PredictResponse, Problem, Ranked, RerankRequest, RerankResponse
from serving.front.triton_models import Failed, Upstream

VERSION = "1"
OTHER = "other"
"""The path of a series for what clients make up: each value is a series."""
BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


@dataclass(frozen=True)
class Settings:
    """`triton` is host:port of the gRPC endpoint. Without `keys` every request is served."""

    triton: str
    keys: Sequence[str] = ()
    seconds: float = 10.0
    most_bytes: int = 1 << 20


class Metrics:
    """What /metrics shows of one front."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        options = {"registry": self.registry}
        self.requests = Counter("front_requests", "Requests by path and status.", ["path", "status"], **options)
        self.texts = Counter("front_texts", "Texts that were predicted, by model.", ["model"], **options)
        self.seconds = Histogram("front_seconds", "Seconds of a request.", ["path"], buckets=BUCKETS, **options)


def make_app(settings: Settings) -> ASGIApp:
    """The application; it opens its channel to Triton when it starts."""
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.upstream = Upstream(settings.triton, seconds=settings.seconds)
        yield
        await app.state.upstream.close()

    about = {"title": "compress", "version": VERSION, "description": "Texts in, predictions out."}
    app = FastAPI(**about, lifespan=lifespan, max_body_size=settings.most_bytes)
    _add_errors(app)
    _add_service(app, metrics)
    _add_models(app, metrics, settings)
    paths = {route.path for route in app.routes}

    async def bounded(scope: Scope, receive: Receive, send: Send) -> None:
        # FastAPI answers these, too, but without a code
        announced = dict(scope.get("headers", ())).get(b"content-length", b"")
        large = announced.isdigit() and int(announced) > settings.most_bytes
        if large:
            path = scope["path"] if scope["path"] in paths else OTHER
            metrics.requests.labels(path, 413).inc()
        await (_too_large() if large else app)(scope, receive, send)

    return bounded


def problem(status: int, error: CompressError) -> JSONResponse:
    """A coded error as the body of a response."""
    return JSONResponse({"code": error.code, "message": f"{error.what}. {error.fix}"}, status)


def _too_large() -> JSONResponse:
    return problem(413, UserError("E770", "the body is too large", "Send fewer texts at a time"))


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(Failed)
    async def failed(_request: Request, failure: Failed) -> JSONResponse:
        return problem(failure.status, failure.error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"][1:])) or "the body"
        return problem(400, UserError("E765", f"{where}: {first['msg']}", "See /docs for the shape of a request"))

    @app.exception_handler(HTTPException)
    async def refused(_request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 413:
            return _too_large()
        return problem(error.status_code, UserError("E765", str(error.detail), "See /docs for the shape of a request"))

    @app.exception_handler(Exception)
    async def broken(_request: Request, error: Exception) -> JSONResponse:
        what = f"the front failed unexpectedly ({type(error).__name__})"
        return problem(500, CompressError("E899", what, "This is a bug; its traceback is in the front's log"))


def _add_service(app: FastAPI, metrics: Metrics) -> None:
    @app.get("/health/live", tags=["service"])
    async def live() -> dict[str, str]:
        """Whether this process answers."""
        return {"status": "live"}

    @app.get("/health/ready", tags=["service"], responses={503: {"model": Problem}})
    async def ready(request: Request) -> Response:
        """Whether Triton is ready."""
        if await request.app.state.upstream.ready():
            return JSONResponse({"status": "ready"})
        return problem(503, UserError("E768", "Triton is not ready", "Wait, or see its log"))

    @app.get("/metrics", tags=["service"])
    async def shown() -> Response:
        """Prometheus' text format."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    def count(request: Request, status: int, start: float) -> None:
        route = request.scope.get("route")
        path = route.path if route else OTHER
        metrics.requests.labels(path, status).inc()
        metrics.seconds.labels(path).observe(time.perf_counter() - start)

    @app.middleware("http")
    async def counted(request: Request, call_next) -> Response:
        start = time.perf_counter()
        try:
            response = await call_next(request)
        except Exception:  # it is answered further out
            count(request, 500, start)
            raise
        count(request, response.status_code, start)
        return response


def _add_models(app: FastAPI, metrics: Metrics, settings: Settings) -> None:
    async def key(request: Request) -> None:
        if settings.keys and not any(hmac.compare_digest(_given(request), known.encode()) for known in settings.keys):
            raise Failed(401, UserError("E769", "no valid API key", "Send the header Authorization: Bearer KEY"))

    errors = {status: {"model": Problem} for status in (400, 401, 404, 413, 500, 502, 503, 504)}
    options = {"dependencies": [Depends(key)], "responses": errors}

    @app.post("/predict", tags=["models"], response_model_exclude_none=True, **options)
    async def predict(body: PredictRequest, request: Request) -> PredictResponse:
        """Predict texts, or pairs of texts."""
        upstream: Upstream = request.app.state.upstream
        model = await upstream.model(body.model)
        predictions = await upstream.predict(model, body.texts, body.pairs, body.task)
        metrics.texts.labels(model.name).inc(len(predictions))
        return PredictResponse(model=model.name, predictions=predictions)

    async def rerank(body: RerankRequest, request: Request) -> RerankResponse:
        """Order documents by what the model, which gives one number for a pair, says of the query and each of them."""
        upstream: Upstream = request.app.state.upstream
        model = await upstream.model(body.model)
        if "VALUE" not in model.outputs or not model.pairs:
            what = f"'{model.name}' does not give one number for a pair of texts"
            raise Failed(400, UserError("E767", what, "Name a model of kind: regression with two text columns"))
        texts = body.texts
        predictions = await upstream.predict(model, [body.query] * len(texts), texts)
        metrics.texts.labels(model.name).inc(len(texts))
        scores = [prediction.value for prediction in predictions]
        order = sorted(range(len(scores)), key=lambda place: -scores[place])[: body.top_n]
        shown = [{"text": text} for text in texts] if body.return_documents else [None] * len(texts)
        results = [Ranked(index=place, relevance_score=scores[place], document=shown[place]) for place in order]
        return RerankResponse(id=str(uuid.uuid4()), results=results, meta={"api_version": {"version": VERSION}})

    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        app.post(path, tags=["models"], response_model_exclude_none=True, operation_id=path[1:].replace("/", "_"), **options)(
            rerank
        )


def _given(request: Request) -> bytes:
    """The key that a request brings, as its bytes: headers are read as Latin-1."""
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    return (value if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")).encode("latin-1")
