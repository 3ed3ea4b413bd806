"""A teammate behind an OpenAI-compatible server, in thirty lines: it answers the relay by looking the symbol up.

python examples/endpoint_stub.py 8765        # then: baton train configs/mixed.toml
"""

from __future__ import annotations

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def look_up(messages: list[dict[str, str]]) -> str:
    """What the table 0>3 1>0 .. makes of the symbol that was heard; of one that it lacks, what it makes of its first."""
    table = dict(re.findall(r"(\w)>(\w)", " ".join(m["content"] for m in messages)))
    said = messages[-1]["content"].rsplit("]:", 1)[-1].strip()[:1]
    return table.get(said, next(iter(table.values()), ""))


class Stub(BaseHTTPRequestHandler):
    """GET /v1/models and POST /v1/chat/completions, and nothing else."""

    def do_GET(self) -> None:
        self.reply({"object": "list", "data": [{"id": "look-up", "object": "model"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = {"role": "assistant", "content": look_up(asked["messages"])}
        self.reply({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    def reply(self, body: dict[str, object]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Stub).serve_forever()
