"""The contract of a protocol: who is due, what a seat is shown, whose answer counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from baton.core.keyed import choice, key
from baton.errors import BatonError
from baton.protocols import TeamProtocol, heard
from baton.testing.claims import require
from baton.types import AgentId, Message, Task, Turn


def check_protocol(
    protocol: TeamProtocol,
    *,
    agents: Sequence[AgentId],
    tasks: Sequence[Task],
    says: Sequence[str],
    episodes: int = 60,
    is_append_only: bool = True,
) -> None:
    """A protocol is a pure function of the task and the turns, ends in time, and shows each seat what it may see.

    Catches: a rule with a memory or a die of its own; seats that do not exist; more turns than `own_turns` (the gate's
    probe episodes and the bounds rest on it), also an episode without end; simultaneous speakers that hear each other;
    teammates' text as an agent's own or the reverse; sampled ids that are lost; another seat's view; a conversation that
    is not append-only although it was promised; an answer that nobody gave (ALGORITHMS 2.1, 2.7).

    Args:
        agents: names in the order of the seats that the protocol was built for.
        tasks: tasks to play, best with a view for each seat.
        says: what agents say here. What the protocol reacts to belongs among it (`@name`); each text is drawn by key and
            then numbered, so that no two messages of an episode are equal.
        is_append_only: an agent's conversation always begins with its last one and its own answer to that, which makes
            its turns one row for training; without the promise each turn may be a row of its own.
    """
    require(protocol.own_turns >= 1, f"own_turns is {protocol.own_turns}: an agent must be able to speak once")
    for seat in range(len(agents)):
        require(bool(protocol.default_system(seat).strip()), f"seat {seat} has no default system prompt")
    for n in range(episodes):
        stage = _Play(protocol, tuple(agents), tasks[n % len(tasks)], is_append_only)
        try:
            stage.play([f"{says[choice(key('contract', n, turn), len(says))]} #{turn}" for turn in range(stage.most)], n)
        except BatonError as error:
            raise AssertionError(f"episode {n} failed on task {stage.task.id}: {error}") from error


@dataclasses.dataclass(frozen=True)
class _Play:
    """One episode of a protocol, watched."""

    protocol: TeamProtocol
    agents: tuple[AgentId, ...]
    task: Task
    is_append_only: bool

    @property
    def most(self) -> int:
        """The most messages that an episode can have."""
        return len(self.agents) * self.protocol.own_turns

    def play(self, texts: Sequence[str], n: int) -> None:
        protocol, rotation = self.protocol, n % len(self.agents) if self.protocol.rotates else 0
        turns: list[Turn] = []
        waves: list[tuple[int, tuple[int, ...]]] = []
        spoken: dict[int, tuple[Message, ...]] = {}
        while due := protocol.due(self.task, turns, rotation):
            waves.append((len(turns), due))
            wave: list[Turn] = []
            # `rollout` asks seats in this order, and appends what they said once all of them have spoken.
            for seat in sorted(due):
                require(0 <= seat < len(self.agents), f"due names seat {seat} of {len(self.agents)}")
                own = sum(turn.seat == seat for turn in (*turns, *wave))
                require(own < protocol.own_turns, f"'{self.agents[seat]}' is due again after {own} of {own} own turns")
                shown = self.conversation(turns, waves, seat)
                before = spoken.get(seat, ())
                require(
                    not self.is_append_only or shown[: len(before)] == before,
                    f"'{self.agents[seat]}' is shown, on its turn {own + 1}, a conversation that does not begin with its "
                    "earlier one and its own answer: it is not append-only",
                )
                at = len(turns) + len(wave)
                said = Turn(
                    kind="action",
                    agent=self.agents[seat],
                    seat=seat,
                    text=texts[at],
                    prompt_ids=(0,),
                    ids=(at + 1,),
                    logprobs=(-1.0,),
                    versions=(0,),
                )
                spoken[seat] = (*shown, Message(role="assistant", content=said.text, ids=said.ids))
                wave.append(said)
            turns += wave
        require(bool(turns), f"nobody is due on task {self.task.id}: an episode needs a message")
        # Asked again, backwards, with other lists: what a protocol remembers of its calls would show.
        for first, due in [*reversed(waves), (len(turns), ())]:
            again = protocol.due(self.task, tuple(turns[:first]), rotation)
            require(
                again == due, f"due is no function of the turns: {due} after {first} messages, and {again} when asked again"
            )
        self.ending(turns)

    def conversation(
        self, turns: Sequence[Turn], waves: Sequence[tuple[int, tuple[int, ...]]], seat: int
    ) -> tuple[Message, ...]:
        """What this seat is shown, checked message by message."""
        name, protocol = self.agents[seat], self.protocol
        shown = protocol.messages(self.task, turns, seat, "")
        require(
            protocol.messages(self.task, tuple(turns), seat, "") == shown,
            f"'{name}' is shown something else when asked again",
        )
        require(
            protocol.messages(self.task, turns, seat, "be brief") == (Message(role="system", content="be brief"), *shown),
            f"the system prompt of '{name}' is not the first message, or changes the others",
        )
        require(
            shown[:1] == (Message(role="user", content=self.task.view(seat)),),
            f"'{name}' is not shown its own view of the task first",
        )
        at: dict[int, int] = {}
        for place, message in enumerate(shown[1:]):
            of = [i for i, t in enumerate(turns) if message.content in (t.text, heard(t.agent, t.text).content)]
            require(len(of) == 1 and of[0] not in at, f"'{name}' is shown '{message.content}', which nobody said, or twice")
            turn = turns[of[0]]
            is_kept = message == (
                Message(role="assistant", content=turn.text, ids=turn.ids)
                if turn.seat == seat
                else heard(turn.agent, turn.text)
            )
            require(
                is_kept,
                f"'{name}' is shown '{turn.text}' of '{turn.agent}' as {message}: own messages are an assistant's with "
                "their sampled ids, teammates' are a user's under their names",
            )
            at[of[0]] = place
        for i, turn in enumerate(turns):
            require(turn.seat != seat or i in at, f"'{name}' is not shown its own message '{turn.text}'")
        for first, due in waves[:-1]:
            together = range(first, first + len(due))
            own = next((at[i] for i in together if turns[i].seat == seat), None)
            early = [turns[i].text for i in together if own is not None and i in at and at[i] < own]
            require(
                not early,
                f"'{name}' is shown {early} before its own answer of that round: simultaneous speakers hear each other",
            )
        return shown

    def ending(self, turns: Sequence[Turn]) -> None:
        """The answer is one that was given, and cut where nothing but cut messages stands behind it."""
        protocol, texts = self.protocol, [turn.text for turn in turns]
        normalisers: Sequence[Callable[[str], str | None]] = (_without_number, _unparseable)
        for normalise in normalisers:
            answer = protocol.answer(turns, normalise, key("contract", "tie"))
            require(answer in texts, f"the answer '{answer}' is none of the messages {texts}")
            again = protocol.answer(tuple(turns), normalise, key("contract", "tie"))
            require(again == answer, f"the answer is '{answer}', and '{again}' when asked again")
        cut = [dataclasses.replace(turn, cut=True) for turn in turns]
        require(not protocol.is_cut(turns) and protocol.is_cut(cut), "is_cut does not follow the messages' own `cut`")


def _without_number(text: str) -> str | None:
    return text.rpartition(" #")[0]


def _unparseable(text: str) -> str | None:
    return None
