"""Model control that the user opened: only with the token, only over HTTP, and only for models of the repository's folder."""

import http.client
import json
import os
import shutil
import signal
import time

import grpc
import pytest
from triton_parts import Clients, QuickServer
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from compressor.errors import UserError
from pipelines.cli.work.serve_work import serve
from serving.guard.model_control import SECRET_HEADER, read_token
from serving.layout.knobs import Knobs
from serving.repository import write_repository
from serving.shared_memory import SHARED_MEMORY

TOKEN = "a-token-of-sixteen-or-more"
MINE = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def opened(tmp_path_factory, classifier, triton):
    """A server with model control, of a repository of its own, in a folder whose name a shell would take apart."""
    folder = tmp_path_factory.mktemp("opened") / "my models;"
    write_repository(folder / "repository", "bare", classifier, knobs=Knobs(max_batch_size=0))
    with QuickServer(folder / "repository", log_path=folder / "log", token=TOKEN) as server:
        yield server


def send(server, path, body=None, headers=MINE, method="POST"):
    connection = http.client.HTTPConnection("127.0.0.1", server.ports["http"], timeout=30)
    try:
        connection.request(method, f"/v2/{path}", None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


class Asked(Clients):
    """Clients that keep their connection and ask one after the other; (start, end) of each request."""

    def __init__(self, server, clients=4):
        super().__init__(clients)
        self.server, self.times = server, []

    def send(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.server.ports["http"], timeout=60)
        while not self.over.is_set():
            start = time.monotonic()
            connection.request("GET", "/v2/models/bare/ready")
            assert connection.getresponse().read() == b""
            self.times.append((start, time.monotonic()))
        connection.close()


def index(server):
    return [(row["name"], row.get("version"), row.get("state")) for row in json.loads(send(server, "repository/index")[1])]


def test_a_new_version_is_loaded_and_a_model_unloaded(opened):
    assert index(opened) == [("bare", "1", "READY")]
    model = opened.repository / "bare"
    shutil.copytree(model / "1", model / "2")
    assert send(opened, "repository/models/bare/load")[0] == 200
    assert ("bare", "2", "READY") in index(opened)
    shutil.copytree(model, opened.repository / "second")
    config = opened.repository / "second" / "config.pbtxt"
    config.write_text(config.read_text().replace('"bare"', '"second"'))
    with Asked(opened) as asked:
        start = time.monotonic()
        assert send(opened, "repository/models/second/load", {})[0] == 200
        end = time.monotonic()
    during = [times for times in asked.times if start < times[0] < end]
    # a load blocks a thread of Triton's HTTP endpoint; without care the guard's connections are all this thread's
    assert len(during) > 20 and max(ended - started for started, ended in during) < (end - start) / 2
    assert send(opened, "models/second/ready", None, {}, "GET")[0] == 200
    opened.follow_loads()
    assert set(opened.triton.stubs.values()) == {"bare", "second"}
    regions = list(SHARED_MEMORY.glob(f"{opened.stage.name}-*"))
    assert len(regions) >= 2 and {region.stat().st_mode & 0o777 for region in regions} == {0o600}
    assert send(opened, "repository/models/second/unload")[0] == 200
    end = time.monotonic() + 10
    while "second" in opened.triton.stubs.values() and time.monotonic() < end:
        assert opened.fault() is None  # a process that ends because its model is unloaded
        opened.triton.find_stubs()
        time.sleep(0.1)
    assert set(opened.triton.stubs.values()) == {"bare"}


@pytest.mark.slow
def test_a_model_whose_instances_have_a_name_is_loaded_again_after_a_crash(opened):
    """Its processes show that name, too."""
    config = opened.repository / "bare" / "config.pbtxt"
    text = config.read_text()
    config.write_text(text.replace("instance_group {", 'instance_group {\n  name: "main_group"'))
    try:
        # one that is loaded keeps its instances, and their names
        assert [send(opened, f"repository/models/bare/{verb}")[0] for verb in ("unload", "load")] == [200, 200]
        opened.follow_loads()
        os.kill(max(opened.triton.stubs), signal.SIGKILL)
        end = time.monotonic() + 10
        while (fault := opened.fault()) is None and time.monotonic() < end:
            time.sleep(0.01)
        assert fault.what == "the process of model 'bare' was killed by SIGKILL"
        opened.restart()
        assert "READY" in [state for name, _, state in index(opened) if name == "bare"]
    finally:
        config.write_text(text)


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("repository/index", {}),
        ("repository/index", {"Authorization": "Bearer another-token-of-sixteen"}),
        ("repository/index", {"Authorization": f"Basic {TOKEN}"}),
        ("repository/index", {SECRET_HEADER: TOKEN}),
        ("repository/models/bare/load", {}),
        ("repository/models/bare/unload", {}),
        ("repository/models/bare/load?x", MINE),
        ("repository//models/bare/load", MINE),
        ("systemsharedmemory/status", MINE),
        ("trace/setting", MINE),
        ("logging", MINE),
    ],
)
def test_nothing_else_is_open(opened, path, headers):
    for method in ("GET", "POST"):
        assert send(opened, path, {} if method == "POST" else None, headers, method)[0] in (403, 404, 405)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"parameters": {"config": json.dumps({"backend": "python"})}}, "E741"),
        ({"parameters": {"file:1/model.py": "cHJpbnQoKQ=="}}, "E741"),
        ([], "E736"),
        ({"parameters": 3}, "E736"),
    ],
)
def test_a_request_brings_no_model_of_its_own(opened, body, code):
    status, answer = send(opened, "repository/models/bare/load", body)
    assert status in (400, 403) and code in answer


def test_of_two_keys_none_reaches_triton(opened):
    """Triton takes the first of two keys of one name, Python's json the last."""
    evil = json.dumps({"parameters": {"config": json.dumps({"backend": "python"})}})[:-1] + ', "parameters": {}}'
    connection = http.client.HTTPConnection("127.0.0.1", opened.ports["http"], timeout=30)
    connection.request("POST", "/v2/repository/models/bare/load", evil, MINE)
    assert connection.getresponse().status == 200
    connection.close()
    assert json.loads(send(opened, "models/bare/config", None, {}, "GET")[1])["backend"] == "onnxruntime"


def test_a_model_with_code_is_not_loaded(opened):
    (opened.repository / "evil" / "1").mkdir(parents=True)
    (opened.repository / "evil" / "config.pbtxt").write_text('name: "evil" backend: "python"')
    shutil.copytree(opened.repository / "bare" / "1", opened.repository / "native" / "1")
    (opened.repository / "native" / "config.pbtxt").write_text('name: "native" backend: "onnxruntime"')
    (opened.repository / "native" / "1" / "libtriton_onnxruntime.so").touch()
    for model in ("evil", "native"):
        status, answer = send(opened, f"repository/models/{model}/load", {})
        assert status == 400 and "E724" in answer
    assert send(opened, "repository/models/none/load", {})[0] == 400


def test_grpc_stays_closed(opened):
    with grpc.insecure_channel(f"127.0.0.1:{opened.ports['grpc']}") as channel:
        for key, value in (("authorization", MINE["Authorization"]), (SECRET_HEADER.lower(), opened._secret)):
            with pytest.raises(grpc.RpcError) as caught:
                GRPCInferenceServiceStub(channel).RepositoryIndex(
                    messages.RepositoryIndexRequest(), timeout=10, metadata=[(f"triton-grpc-protocol-{key}", value)]
                )
            assert "This protocol is restricted" in caught.value.details()


def test_other_users_do_not_see_the_token(opened):
    for process in (opened.triton.process, opened.guard.process):
        for name in ("cmdline", "environ"):
            with open(f"/proc/{process.pid}/{name}") as file:
                assert TOKEN not in file.read()
    assert TOKEN not in opened.log_path.read_text()


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        (None, 0o600, "cannot be read"),
        (TOKEN, 0o640, "other users can read"),
        ("short", 0o600, "not one word of 16"),
        (f"{TOKEN}\r\nX: y", 0o600, "not one word"),
        ("ü" * 20, 0o600, "not ASCII"),
    ],
)
def test_a_token_that_is_none(tmp_path, text, mode, words):
    path = tmp_path / "token"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(UserError, match=f"E740 .*{words}"):
        read_token(path)


def test_a_token_needs_model_control(tmp_path):
    path = tmp_path / "token"
    path.touch(0o600)
    os.truncate(path, 0)
    path.write_text(f"{TOKEN}\n")
    assert read_token(path) == TOKEN
    for given in ({"model_control": True, "token_file": None}, {"model_control": False, "token_file": path}):
        with pytest.raises(UserError, match=r"E740 .*are given together"):
            serve(tmp_path, drain=1, max_body=1, **given)
