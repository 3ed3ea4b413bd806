"""Teammates that are never trained: local ones, and ones behind an OpenAI-compatible server (ALGORITHMS 2.7)."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import worlds

from baton import assemble, config, records, run
from baton.errors import ConfigError, ModelError, TaskFault
from baton.evaluation import evaluate
from baton.types import Failed

Answer = Callable[[list[dict[str, str]], int], str | int]
"""(messages, calls before) -> what the server says, or the status that it fails with."""


@contextmanager
def server(answer: Answer, *, models: tuple[str, ...] = ("parrot",)) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An OpenAI-compatible server on loopback; yields its address and the requests that it saw."""
    seen: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.say({"object": "list", "data": [{"id": m, "object": "model"} for m in models]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append(asked)
            said = answer(asked["messages"], len(seen) - 1)
            if isinstance(said, int):
                self.send_error(said)
                return
            self.say({"choices": [{"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}]})

        def say(self, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Silent."""

    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=served.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{served.server_address[1]}/v1", seen
    finally:
        served.shutdown()
        served.server_close()
        thread.join()


def first_bit(messages: list[dict[str, str]], _: int) -> str:
    """The first speaker of parity, played right: the bit that it was shown."""
    return messages[-1]["content"].strip()[-1]


def with_endpoint(url: str, *overrides: str) -> config.Config:
    tree = worlds.tree(("a", "b"))
    tree["agents"][0] = {"name": "a", "model": f"endpoint:{url}", "trainable": False, "system": "", "max_new_tokens": 4}
    return config.parse(tree, overrides)


def test_a_frozen_teammate_speaks_and_is_never_touched() -> None:
    settings = worlds.parity("agents.a.trainable=false", 'agents.a.lr="auto"', "algorithm.stages=20")
    stage = worlds.world(settings)
    reports = stage.train()
    assert {r.agent for r in reports} == {"b"} and len(reports) == 20
    assert stage.position.team.versions["a"] == 0 and stage.position.team.versions["b"] > 0
    turns = [t for e in stage.journal.evidence[-1].episodes for t in e.turns if t.agent == "a"]
    assert turns and all(t.kind == "action" and set(t.versions) == {0} for t in turns)


def test_a_team_with_a_frozen_teammate_resumes_and_is_evaluated(tmp_path: Path) -> None:
    settings = worlds.relay("agents.first.trainable=false", 'agents.first.lr="auto"', 'agents.first.radius="preset"')
    run.train(settings, run=tmp_path / "whole")
    worlds.kill(settings, tmp_path / "killed", "after the record", 2)
    worlds.go_on(settings, tmp_path / "killed")
    assert worlds.final(tmp_path / "killed") == worlds.final(tmp_path / "whole")
    report = evaluate(tmp_path / "whole", episodes=16)
    assert {r["name"] for r in report["rows"]} >= {"team", "untrained team", "first replaced by chance"}
    team = run.load_team(tmp_path / "whole")
    assert [t.agent for t in team.play(team.plan.splits.test[0]).turns] == ["first", "second"]
    team.close()


def test_a_teammate_behind_an_endpoint_is_heard_as_text_and_the_team_learns(tmp_path: Path) -> None:
    with server(first_bit) as (url, seen):
        settings = with_endpoint(url, "algorithm.stages=12")
        done = run.train(settings, run=tmp_path / "run")
        assert done.start["is_repeatable"] is False and {u["agent"] for u in done.updates} == {"b"}
        assert done.updates[-1]["episodes"]["reward"] > 0.8 > done.updates[0]["episodes"]["reward"]
        rows = records.read_episodes(tmp_path / "run" / done.updates[0]["episodes_file"])
        turn = rows[0]["turns"][0]
        assert (turn["kind"], turn["agent"], turn["ids"], turn["logprobs"]) == ("observation", "a", [], [])
        assert turn["text"] in "01" and seen[0]["model"] == "parrot" and seen[0]["max_tokens"] == 4
        assert isinstance(seen[0]["seed"], int) and seen[0]["temperature"] == 1.0
        report = evaluate(tmp_path / "run", episodes=32)
        assert report["rows"][0]["value"] > 0.7
    saved = json.loads((tmp_path / "run" / "team.json").read_text())
    assert [("weights" in a) for a in saved["agents"]] == [False, True]


def test_thinking_is_not_handed_on() -> None:
    def thinks(messages: list[dict[str, str]], n: int) -> str:
        return f"<think>it ends in {n}</think>\n{first_bit(messages, n)}"

    with server(thinks) as (url, _):
        stage = worlds.world(with_endpoint(url))
        assert {t.text for e in stage.play() for t in e.turns if t.agent == "a"} <= {"0", "1"}


def test_a_server_that_fails_now_and_then_is_asked_again_and_one_that_fails_for_good_costs_the_episode() -> None:
    def flaky(messages: list[dict[str, str]], n: int) -> str | int:
        return 503 if n % 3 == 0 else first_bit(messages, n)

    with server(flaky) as (url, seen):
        stage = worlds.world(with_endpoint(url, "agents.a.endpoint={concurrency=1}"))
        assert all(e.is_scored for e in stage.play(4)) and len(seen) > 8

    def refuses(messages: list[dict[str, str]], n: int) -> str | int:
        return 400 if n % 2 else first_bit(messages, n)

    with server(refuses) as (url, _):
        stage = worlds.world(with_endpoint(url, "agents.a.endpoint={concurrency=1}"))
        failed = [e for e in stage.play(4) if not e.is_scored]
        assert len(failed) == 4 and isinstance(failed[0].outcome, Failed)
        assert failed[0].outcome.reason.startswith("endpoint of 'a': 400")
        assert all(len(e.turns) == 0 for e in failed)


def test_what_is_legal_json_and_no_text_neither_ends_the_run_nor_is_lost() -> None:
    with server(lambda messages, n: "\ud800" + first_bit(messages, n)) as (url, _):
        stage = worlds.world(with_endpoint(url))
        assert {t.text for e in stage.play(2) for t in e.turns if t.agent == "a"} <= {"?0", "?1"}


def test_a_server_that_went_away_ends_the_run_with_its_name(tmp_path: Path) -> None:
    with server(first_bit) as (url, _):
        settings = with_endpoint(url, "agents.a.endpoint={retries=0}")
        stage = worlds.world(settings)
    with pytest.raises(TaskFault, match=r"all 32 episodes.*endpoint of 'a': ConnectError"):
        stage.train()
    with pytest.raises(ModelError, match=r"'a': http://127.0.0.1:\d+/v1/models does not answer"):
        run.train(settings, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"trainable": True}, "set trainable = false"),
        ({"lr": 0.1}, "lr of 'a' has no effect"),
        ({"radius": {"token": 1.0, "message_mean": 1.0}}, "radius of 'a' has no effect"),
        ({"warm_start": {}}, "warm_start of 'a'"),
        ({"model": "table:01", "endpoint": {}}, "endpoint of 'a' has no effect"),
    ],
)
def test_keys_that_a_frozen_agent_does_not_have_are_refused(change: dict[str, Any], said: str) -> None:
    tree = worlds.tree(("a", "b"))
    tree["agents"][0] = {"name": "a", "model": "endpoint:http://127.0.0.1:1/v1", "trainable": False, **change}
    with pytest.raises(ConfigError, match=said):
        config.parse(tree)


def test_a_team_without_a_trainable_agent_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to train"):
        worlds.parity("agents.a.trainable=false", "agents.b.trainable=false", 'agents.a.lr="auto"', 'agents.b.lr="auto"')


def test_a_server_with_several_models_needs_a_name() -> None:
    with server(first_bit, models=("x", "y")) as (url, _):
        with pytest.raises(ModelError, match=r"lists the models \['x', 'y'\]; name one with endpoint.served_name"):
            worlds.world(with_endpoint(url))
        with pytest.raises(ModelError, match="does not serve 'z'"):
            worlds.world(with_endpoint(url, "agents.a.endpoint={served_name='z'}"))
        worlds.world(with_endpoint(url, "agents.a.endpoint={served_name='y'}"))


def test_an_address_that_is_none_is_refused_before_anything_is_asked() -> None:
    with pytest.raises(ConfigError, match="write the server's base address"):
        worlds.world(with_endpoint("127.0.0.1:8000"))


def test_a_server_that_moved_is_followed_and_one_that_answers_nonsense_is_named() -> None:
    with server(first_bit) as (url, seen):
        moved: dict[str, str] = {"to": url}

        class Elsewhere(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if "to" in moved:
                    self.send_response(307)
                    self.send_header("Location", moved["to"] + self.path.removeprefix("/v1"))
                    self.end_headers()
                    return
                body = b"[" * 100_000
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.do_GET()

            def log_message(self, format: str, *args: Any) -> None:
                """Silent."""

        old = ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere)
        threading.Thread(target=old.serve_forever, daemon=True).start()
        try:
            settings = with_endpoint(f"http://127.0.0.1:{old.server_address[1]}/v1", "algorithm.stages=1")
            stage = worlds.world(settings)
            assert len(stage.train()) == 1 and len(seen) > 0
            del moved["to"]
            with pytest.raises(ModelError, match=r"'a': .* does not answer as an OpenAI-compatible server \(RecursionError"):
                assemble.prepare(settings, root=Path())
        finally:
            old.shutdown()
            old.server_close()
