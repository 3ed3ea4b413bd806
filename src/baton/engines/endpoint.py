"""A teammate behind an OpenAI-compatible server: text in, text out. Its tokens have no ids and no log-probabilities here, so
they are never trained and no divergence is taken of them (ALGORITHMS 2.7)."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Sequence
from typing import Any, cast

import httpx
from pydantic import BaseModel, ConfigDict, Field

from baton.engines.engine import Reply, TextRequest
from baton.errors import ConfigError, ModelError
from baton.types import Failed

_THINKING = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)
_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)
"""Statuses that may be different next time."""


class EndpointOptions(BaseModel):
    """How a server is asked."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    served_name: str = Field(default="auto", description="the server's name of the model; auto: the only one that it lists")
    key_variable: str = Field(default="OPENAI_API_KEY", description="environment variable with the API key, if it is set")
    timeout: float = Field(default=60.0, gt=0, description="seconds for one message, then it is asked again")
    retries: int = Field(default=2, ge=0, le=10, description="times that a message is asked again; then its episode fails")
    concurrency: int = Field(default=16, ge=1, description="messages in flight at once")


class Endpoint:
    """Implements `engine.Speaker` for one server.

    The request's seed goes along where the server takes one, but nothing here is promised to be the same twice: a run with
    an endpoint is resumed exactly as far as its own agents are concerned and no further.
    """

    def __init__(self, agent: str, url: str, options: EndpointOptions) -> None:
        self.agent, self.url, self.options = agent, url.rstrip("/"), options
        if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", url):
            raise ConfigError(
                f"agents.{agent}.model = 'endpoint:{url}': write the server's base address, e.g. endpoint:http://127.0.0.1:8000/v1"
            )
        self._name = None if options.served_name == "auto" else options.served_name

    def check(self) -> None:
        """Whether the server is there and which model it serves. Costs one request for its list of models.

        Raises:
            ModelError: it does not answer, or lists none or several and `served_name` names none.
        """
        try:
            response = httpx.get(
                f"{self.url}/models",
                headers=self._headers(),
                timeout=min(10.0, self.options.timeout),
                follow_redirects=True,
            )
            response.raise_for_status()
            listed = [str(entry["id"]) for entry in cast("dict[str, Any]", response.json())["data"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError, RecursionError) as error:
            why = " ".join(str(error).split())
            raise ModelError(
                f"'{self.agent}': {self.url}/models does not answer as an OpenAI-compatible server "
                f"({type(error).__name__}: {why}); start the server, or mend agents.{self.agent}.model"
            ) from error
        if self._name is None and len(listed) != 1:
            raise ModelError(f"'{self.agent}': {self.url} lists the models {listed}; name one with endpoint.served_name")
        if self._name is not None and self._name not in listed:
            raise ModelError(f"'{self.agent}': {self.url} does not serve '{self._name}', it lists {listed}")
        self._name = self._name or listed[0]

    async def speak(self, requests: Sequence[TextRequest]) -> Sequence[Reply | Failed]:
        """One reply for each request, in order; a message that could not be had is `Failed` with the reason."""
        gate = asyncio.Semaphore(self.options.concurrency)
        timeout = self.options.timeout
        # Reading the machine's certificates takes longer than a short answer, and plain http has no use for them.
        verify = self.url.startswith("https")
        async with httpx.AsyncClient(
            headers=self._headers(), timeout=timeout, follow_redirects=True, verify=verify
        ) as client:

            async def one(request: TextRequest) -> Reply | Failed:
                async with gate:
                    return await self._ask(client, request)

            return await asyncio.gather(*(one(request) for request in requests))

    async def _ask(self, client: httpx.AsyncClient, request: TextRequest) -> Reply | Failed:
        body = {
            "model": self._name,
            "messages": [{"role": m.role, "content": m.content} for m in request.messages],
            "max_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "seed": int.from_bytes(request.key[:4], "little") >> 1,
        }
        why = ""
        for attempt in range(self.options.retries + 1):
            if attempt:
                await asyncio.sleep(min(8.0, 0.25 * 2**attempt))
            try:
                response = await client.post(f"{self.url}/chat/completions", json=body)
                if response.status_code in _AGAIN:
                    why = f"status {response.status_code}"
                    continue
                response.raise_for_status()
                choice = cast("dict[str, Any]", response.json())["choices"][0]
                # Half a surrogate pair is legal JSON and no text: a tokenizer could not read it.
                said = str(choice["message"]["content"] or "").encode("utf-8", "replace").decode()
                text = _THINKING.sub("", said).strip()
                return Reply(text=text, finish_reason="length" if choice.get("finish_reason") == "length" else "stop")
            except httpx.HTTPStatusError as error:
                return Failed(reason=f"endpoint of '{self.agent}': {error.response.status_code} {error.response.text[:200]}")
            except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
                why = " ".join(f"{type(error).__name__} {error}".split())[:200]
        return Failed(reason=f"endpoint of '{self.agent}': {why} ({self.options.retries + 1} times)")

    def _headers(self) -> dict[str, str]:
        secret = os.environ.get(self.options.key_variable)
        return {"Authorization": f"Bearer {secret}"} if secret else {}
