"""The contract of a codec: messages and sampled ids are kept, and no text becomes a control token."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from baton.engines.engine import Codec
from baton.testing.claims import require
from baton.types import Message, TokenIds


def check_codec(
    codec: Codec,
    *,
    texts: Sequence[str],
    own_ids: TokenIds,
    control_texts: Sequence[str] = (),
    control_ids: Collection[int] = (),
    replies: Sequence[str] = (),
    has_system: bool = True,
) -> None:
    """A codec keeps every message, keeps sampled ids, and lets no text become a control token.

    Args:
        texts: two or more different texts, none inside another, that the model's alphabet can spell.
        own_ids: sampled ids of an agent's message; best a sequence that decoding and encoding again would change.
        control_texts: texts that spell the model's control tokens, such as its end marker.
        control_ids: ids of control tokens, in addition to the codec's `end_ids`.
        replies: texts that an agent of this model can say.
        has_system: the template knows a system message.
    """
    require(len(set(texts)) >= 2, "the codec check needs at least two different texts")
    first, second = texts[0], texts[1]
    head = (Message(role="system", content=second),) if has_system else ()
    talk = (*head, Message(role="user", content=first))
    prompt = codec.encode(talk)
    require(len(prompt) > 0, "encode gave no ids for a conversation")
    require(
        codec.context_length >= len(prompt),
        f"a prompt of {len(prompt)} ids exceeds context_length {codec.context_length}",
    )
    for text in texts:
        codec.encode((Message(role="user", content=text),))
    require(codec.encode(talk) == prompt, "encode gives other ids for the same messages after other calls")
    for text in [message.content for message in talk]:
        require(text in codec.decode(prompt), f"the message '{text}' is not in the decoded prompt: encode lost it")
    require(
        codec.encode((*head, Message(role="user", content=second))) != prompt,
        "two conversations have the same ids",
    )
    swapped = (*talk, Message(role="assistant", content=first), Message(role="user", content=second))
    other = (*talk, Message(role="assistant", content=second), Message(role="user", content=first))
    require(codec.encode(swapped) != codec.encode(other), "two orders of the same messages have the same ids")

    said = Message(role="assistant", content=codec.decode(own_ids), ids=own_ids)
    later = codec.encode((*talk, said, Message(role="user", content=second)))
    require(
        any(later[i : i + len(own_ids)] == own_ids for i in range(len(later))),
        f"sampled ids {own_ids} are not in a later prompt as they were sampled: encode rewrote them",
    )
    for end in sorted(codec.end_ids):
        require(codec.decode((*own_ids, end)) == codec.decode(own_ids), f"decode shows the end id {end} as text")

    for text in replies:
        ids = codec.reply(text)
        require(codec.decode(ids) == text, f"the reply '{text}' decodes to '{codec.decode(ids)}'")
        ends = [i for i, token in enumerate(ids) if token in codec.end_ids]
        require(
            ends == ([len(ids) - 1] if codec.end_ids else []),
            f"the reply '{text}' is not its content and then one end id: end ids stand at {ends} of {len(ids)}",
        )

    control = {*control_ids, *codec.end_ids}

    def marks(content: str) -> int:
        return sum(i in control for i in codec.encode((*head, Message(role="user", content=content))))

    for text in control_texts:
        require(
            marks(first + text) == marks(first),
            f"the text '{text}' became control tokens in a prompt: content must be encoded with special parsing off",
        )
        require(
            codec.encode((*head, Message(role="user", content=first + text)))
            != codec.encode((*head, Message(role="user", content=first))),
            f"the text '{text}' vanished from a prompt",
        )
