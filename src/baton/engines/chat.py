"""From messages to one model's ids and back: the chat template rendered once per pattern of roles, contents encoded apart.

A template is rendered with a unique sentinel in each message's place and split there. What lies between the sentinels is the
template's and may hold control tokens; what goes in their place is text and can never become one (PITFALLS B12, T25).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast
from weakref import WeakValueDictionary

from tokenizers import Tokenizer

from baton.engines.models import context_length, read_config
from baton.errors import ModelError, cause
from baton.types import Message, TokenIds

Role = Literal["system", "user", "assistant"]

_TODAY = date(2024, 7, 26)
"""What a template that prints the date is told, whatever the day: a run that is resumed tomorrow sees the same prompts."""

_CLOCK = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")

_CACHED = 1 << 16
"""Entries of each cache: more than the texts of one update, a few tens of MB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Skeleton:
    """A rendered template: `pieces[i]` stands before message i, the last one ends with the generation prompt. `stripped[i]`:
    the template strips the whitespace around message i."""

    pieces: tuple[TokenIds, ...]
    stripped: tuple[bool, ...]


class ChatCodec:
    """Implements `engine.Codec` for the tokenizer and chat template of a `from_pretrained` folder.

    Text between two control tokens is encoded as the template's part and the content's part, not as one string; for benign
    content the ids are those of `apply_chat_template` wherever the tokenizer splits there anyway (it does after a newline).
    An assistant message without ids (a teammate's, or a script's) is text like any other.

    Raises:
        ModelError: no template, or one that loses or repeats a message; no end token; no context length.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.folder = folder
        self._rendering = cast(Any, AutoTokenizer).from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if not self._rendering.chat_template:
            raise ModelError(f"{folder} has no chat template; use an instruct model, or add chat_template.jinja")
        if isinstance(self._rendering.chat_template, str):
            self._rendering.chat_template = _CLOCK.sub(
                lambda call: repr(_TODAY.strftime(call[2])), self._rendering.chat_template
            )
        self._tokenizer = Tokenizer.from_str(self._rendering.backend_tokenizer.to_str())
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        plain = json.loads(self._tokenizer.to_str())
        self._control = {str(token["content"]): int(token["id"]) for token in plain["added_tokens"]}
        # What the model gives for text it cannot spell is no control token, even where it is listed with them. Unigram names
        # it by id, the other kinds by text.
        unknown = {self._control.get(plain["model"].get("unk_token"), -1), plain["model"].get("unk_id")}
        self._forbidden = frozenset(self._control.values()) - unknown
        _no_prefix_inside(plain["pre_tokenizer"])
        self._inner_tokenizer = Tokenizer.from_str(json.dumps(plain))
        plain["added_tokens"], plain["post_processor"] = [], None
        self._text_tokenizer = Tokenizer.from_str(json.dumps(plain))
        self._context_length = context_length(folder)
        self._text_ids = lru_cache(maxsize=_CACHED)(self._encode_text)
        self._decoded = lru_cache(maxsize=_CACHED)(self._decode)
        self._skeleton = lru_cache(maxsize=1024)(self._render)
        self._require_rows()
        self._folds_system = not self._has_system()
        self._joins_users = not self._takes(("user", "user"))
        self._end_ids = self._find_end_ids()
        self._append_only = self._is_append_only()

    @property
    def end_ids(self) -> frozenset[int]:
        """Every id that ends a message: the tokenizer's, the generation config's, and the one with which the template closes
        an assistant's message."""
        return self._end_ids

    @cached_property
    def tokens(self) -> Mapping[str, int]:
        """Every token's text and id, control tokens included."""
        return MappingProxyType(self._tokenizer.get_vocab(with_added_tokens=True))

    @property
    def context_length(self) -> int:
        """Tokens of prompt and answer together, from the config."""
        return self._context_length

    @property
    def append_only(self) -> bool:
        """Whether a longer conversation begins with the ids of the shorter one, own sampled ids included. Where it does not,
        each turn trains as a row of its own (`core.batching.trajectories`)."""
        return self._append_only

    def encode(self, messages: Sequence[Message]) -> TokenIds:
        """Prompt ids up to and including the generation prompt.

        Raises:
            ModelError: the template refuses this pattern of roles, or loses or repeats a message.
        """
        if self._folds_system:
            messages = _fold_system(messages)
        if self._joins_users:
            messages = _join_users(messages)
        skeleton = self._skeleton(tuple(message.role for message in messages))
        ids: list[int] = []
        ended = False
        for piece, message, stripped in zip(skeleton.pieces, messages, skeleton.stripped, strict=False):
            ids.extend(piece[1:] if ended and piece[:1] == (ids[-1],) else piece)
            if message.ids is None:
                ids.extend(self._text_ids(message.content.strip() if stripped else message.content))
                ended = False
            else:
                ids.extend(message.ids)
                # An answer that ended by itself already holds the end token that the template goes on with; a cut one not.
                ended = bool(message.ids) and message.ids[-1] in self._end_ids
        last = skeleton.pieces[-1]
        ids.extend(last[1:] if ended and last[:1] == (ids[-1],) else last)
        return tuple(ids)

    def reply(self, text: str) -> TokenIds:
        """A message as the agent itself would sample it: its content, then the id with which the template ends a turn.

        Raises:
            ModelError: the template ends an assistant's turn with no end token.
        """
        after = self._skeleton(("user", "assistant")).pieces[2]
        end = next((i for i in after if i in self._end_ids), None)
        if end is None:
            raise ModelError(
                f"{self.folder}: the chat template ends an assistant's turn with none of the end ids {sorted(self._end_ids)}"
            )
        return (*self._text_ids(text), end)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of these ids without control tokens."""
        return self._decoded(tuple(ids))

    def _decode(self, ids: TokenIds) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def _encode_text(self, text: str) -> TokenIds:
        ids: list[int] = self._text_tokenizer.encode(text, add_special_tokens=False).ids
        if self._forbidden.isdisjoint(ids):
            return tuple(ids)
        # The vocabulary itself spells a control token: cut each of them after its first character, so that none is whole.
        parts = [text]
        for token in self._control:
            parts = [piece for part in parts for piece in _cut(part, token)]
        ids = [i for part in parts for i in self._text_tokenizer.encode(part, add_special_tokens=False).ids]
        found = self._forbidden.intersection(ids)
        if found:
            raise ModelError(
                f"{self.folder}: plain text encodes to control ids {sorted(found)}; this tokenizer cannot keep them apart"
            )
        return tuple(ids)

    def _render(self, roles: tuple[Role, ...]) -> _Skeleton:
        names = [f"BatonSlot{i}x7f3a9cEnd" for i in range(len(roles))]
        conversation = [{"role": role, "content": f" {name} "} for role, name in zip(roles, names, strict=True)]
        try:
            text = cast(str, self._rendering.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # a template is a program of its own and may raise anything
            raise ModelError(
                f"chat template of {self.folder} refuses the roles {', '.join(roles) or '(none)'}: {cause(error)}; "
                "change the protocol or the template"
            ) from error
        pieces: list[TokenIds] = []
        stripped: list[bool] = []
        for i, name in enumerate(names):
            if text.count(name) != 1:
                raise ModelError(
                    f"chat template of {self.folder} shows message {i} ({roles[i]}) {text.count(name)} times for the roles "
                    f"{', '.join(roles)}; a message must appear once"
                )
            whole = f" {name} " in text
            before, _, text = text.partition(f" {name} " if whole else name)
            if any(later in before for later in names):
                raise ModelError(f"chat template of {self.folder} reorders the messages of {', '.join(roles)}")
            pieces.append(self._template_ids(before, is_first=i == 0))
            stripped.append(not whole)
        return _Skeleton(pieces=(*pieces, self._template_ids(text, is_first=False)), stripped=tuple(stripped))

    def _template_ids(self, text: str, *, is_first: bool) -> TokenIds:
        # The template writes its own BOS; the tokenizer must not add a second one (PITFALLS B06).
        tokenizer = self._tokenizer if is_first else self._inner_tokenizer
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    def _require_rows(self) -> None:
        """Every id of the tokenizer needs its row of the embedding."""
        rows, most = read_config(self.folder).get("vocab_size"), max(self._tokenizer.get_vocab().values(), default=0)
        if isinstance(rows, int) and most >= rows:
            raise ModelError(
                f"{self.folder}: the tokenizer has id {most}, the embedding {rows} rows; "
                "call model.resize_token_embeddings(len(tokenizer)) and save the model again"
            )

    def _has_system(self) -> bool:
        if self._takes(("system", "user")):
            return True
        self._skeleton(("user",))
        return False

    def _takes(self, roles: tuple[Role, ...]) -> bool:
        try:
            self._skeleton(roles)
        except ModelError:
            return False
        return True

    def _find_end_ids(self) -> frozenset[int]:
        declared: list[Any] = [self._rendering.eos_token_id, read_config(self.folder).get("eos_token_id")]
        generation = self.folder / "generation_config.json"
        if generation.is_file():
            declared.append(json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id"))
        after = self._skeleton(("user", "assistant", "user")).pieces[2]
        if after and after[0] in set(self._control.values()):
            declared.append(after[0])
        found: set[int] = set()
        for value in declared:
            found.update(cast(list[int], value) if isinstance(value, list) else [value] if isinstance(value, int) else [])
        if not found:
            raise ModelError(f"{self.folder} names no end token (tokenizer and generation_config have no eos)")
        return frozenset(found)

    def _is_append_only(self) -> bool:
        first: tuple[Role, ...] = ("user",) if self._folds_system else ("system", "user")
        history: tuple[TokenIds, ...] = self._skeleton(first).pieces
        for turns in (1, 2):
            roles: tuple[Role, ...] = (*first, *(cast(tuple[Role, ...], ("assistant", "user")) * turns))
            longer = self._skeleton(roles).pieces
            if longer[: len(history)] != history:
                return False
            history = longer
        return True


_shared: WeakValueDictionary[str, ChatCodec] = WeakValueDictionary()


def codec_of(folder: Path) -> ChatCodec:
    """The codec of a model folder. Folders with the same tokenizer, template and configs share one and its caches."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".jinja", ".txt", ".model"):
            digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    codec = _shared.get(digest.hexdigest())
    if codec is None:
        codec = _shared[digest.hexdigest()] = ChatCodec(folder)
    return codec


def _no_prefix_inside(pre_tokenizer: Any) -> None:
    """A SentencePiece tokenizer may mark the first word of a whole string (`prepend_scheme` first). Messages and all pieces
    of a template but the first stand inside one."""
    if not isinstance(pre_tokenizer, dict):
        return
    node = cast("dict[str, Any]", pre_tokenizer)
    if node.get("prepend_scheme") == "first":
        node["prepend_scheme"] = "never"
    for inner in node.get("pretokenizers", ()):
        _no_prefix_inside(inner)


def _fold_system(messages: Sequence[Message]) -> Sequence[Message]:
    """The system text at the head of the first user message, for templates without that role."""
    if not messages or messages[0].role != "system":
        return messages
    system, *rest = messages
    if not rest or rest[0].role != "user":
        return [Message(role="user", content=system.content), *rest]
    return [Message(role="user", content=f"{system.content}\n\n{rest[0].content}"), *rest[1:]]


def _join_users(messages: Sequence[Message]) -> Sequence[Message]:
    """User messages that follow each other as one, for templates in which roles must alternate."""
    joined: list[Message] = []
    for message in messages:
        if joined and message.role == joined[-1].role == "user":
            joined[-1] = Message(role="user", content=f"{joined[-1].content}\n\n{message.content}")
        else:
            joined.append(message)
    return joined


def _cut(text: str, token: str) -> list[str]:
    pieces: list[str] = []
    while token in text and len(token) > 1:
        at = text.index(token) + 1
        pieces.append(text[:at])
        text = text[at:]
    return [*pieces, text]
