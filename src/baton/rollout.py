"""Episodes of a team, played in waves (ALGORITHMS 5.6).

A wave is every request of one agent at one turn index, sorted by episode, in one `submit`; grading runs between waves.
What is sampled depends on the address and the weights alone, never on timing: that is what makes resume bitwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from baton.core.keyed import Key, choice, key
from baton.engines.engine import Codec, Completion, CoupledRequest, Request, Sampler, Speaker, TextRequest
from baton.errors import BatonError, TaskFault
from baton.protocols import TeamProtocol
from baton.types import AgentId, Episode, Failed, Outcome, Scored, Slot, Task, Truncated, Turn

Grader = Callable[[Sequence[tuple[Task, str]]], Sequence[Outcome]]
"""Grades many answers at once: `Scored` or `Failed` for each, in order."""


Substitute = Callable[[Task, int, Key], str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """One agent's place at the table and how it is sampled."""

    agent: AgentId
    system: str
    max_new_tokens: int
    temperature: float
    codec: Codec | None
    """None where a `speaker` answers in text only."""
    speaker: Speaker | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Play:
    """One episode to be played. `sibling` tells apart the episodes of one prompt."""

    task: Task
    sibling: int = 0


Coupling = Literal["maximal", "inverse_cdf"]
BESIDE = "/beside"
"""Ends the id of an episode that was played beside another one with the same keys."""


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Episodes of another team on the same plays, with the same keys: while a transcript is still theirs, an agent with the
    same weights says what it said there, and one with other weights differs as rarely as the coupling can make it (3.6)."""

    episodes: Sequence[Episode]
    slots: Mapping[AgentId, Slot]
    """Where the weights of those episodes were taken from (default: promoted); they have to lie there still."""
    coupling: Coupling = "maximal"


@dataclass
class _State:
    play: Play
    id: str
    twin: Episode | None = None
    """The other team's episode, as long as this one is word for word the same."""
    turns: list[Turn] = field(default_factory=lambda: list[Turn]())
    rotation: int = 0
    outcome: Outcome | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """Everything an episode needs: who sits where, the rules, the sampler and the grader."""

    seats: tuple[Seat, ...]
    protocol: TeamProtocol
    sampler: Sampler
    grade: Grader
    normalise: Callable[[str], str | None]

    def _key(self, state: _State, index: int, address: tuple[str | int, ...]) -> Key:
        return key(*address, state.play.task.id, state.play.sibling, len(state.turns), self.seats[index].agent)

    def _request(self, state: _State, index: int, address: tuple[str | int, ...], slot: Slot) -> Request | None:
        seat = self.seats[index]
        assert seat.codec is not None
        prompt = seat.codec.encode(self.protocol.messages(state.play.task, state.turns, index, seat.system))
        room = seat.codec.context_length - len(prompt) - seat.max_new_tokens
        if room < 0:
            state.outcome = Failed(
                reason=f"context: '{seat.agent}' needs {len(prompt)} prompt tokens + {seat.max_new_tokens} new ones, "
                f"its context holds {seat.codec.context_length}"
            )
            return None
        return Request(
            id=state.id,
            agent=seat.agent,
            slot=slot,
            prompt_ids=prompt,
            max_new_tokens=seat.max_new_tokens,
            temperature=seat.temperature,
            key=self._key(state, index, address),
        )

    def _turn(self, index: int, request: Request, said: Completion) -> Turn:
        seat = self.seats[index]
        assert seat.codec is not None
        return Turn(
            kind="action",
            agent=seat.agent,
            seat=index,
            text=seat.codec.decode(said.ids),
            prompt_ids=request.prompt_ids,
            ids=said.ids,
            logprobs=said.logprobs,
            versions=(said.version,) * len(said.ids),
            finish_reason=said.finish_reason,
            # A limit of one token leaves no room for an end token: the format is one token, nothing was cut.
            cut=said.finish_reason == "length" and seat.max_new_tokens > 1,
        )

    async def _wave(
        self,
        states: Sequence[_State],
        index: int,
        address: tuple[str | int, ...],
        slots: Mapping[AgentId, Slot],
        substitute: Substitute | None,
        tick: Callable[[], None],
        beside: Beside | None,
    ) -> list[tuple[_State, Turn]]:
        """One seat's messages for all these episodes, in one submit."""
        seat = self.seats[index]
        slot = slots.get(seat.agent, "promoted")
        other = slot if beside is None else beside.slots.get(seat.agent, "promoted")
        said: list[tuple[_State, Turn]] = []
        asked: dict[str, tuple[_State, Request]] = {}
        paired: list[tuple[_State, Request, Turn]] = []
        remote: list[_State] = []
        for state in states:
            theirs = _same_turn(state, index)
            if theirs is not None and slot == other:
                said.append((state, theirs))
                tick()
                continue
            if substitute is not None:
                text = substitute(state.play.task, index, key(*address, state.id, len(state.turns), "substitute"))
                if text is not None:
                    turn = Turn(kind="observation", agent=seat.agent, seat=index, text=text)
                    said.append((state, turn))
                    continue
            if seat.speaker is not None:
                remote.append(state)
                continue
            request = self._request(state, index, address, slot)
            if request is not None and theirs is not None and beside is not None and beside.coupling == "maximal":
                paired.append((state, request, theirs))
            elif request is not None:
                asked[request.id] = (state, request)
        if remote:
            said += await self._hear(remote, index, address)
            for _ in remote:
                tick()
        if asked:
            requests = [request for _, request in asked.values()]
            heard: dict[str, Completion] = {}
            async for completion in self.sampler.submit(requests):
                heard[completion.id] = completion
                tick()
            missing = [i for i in asked if i not in heard]
            if missing:
                raise BatonError(f"the sampler gave no completion for {len(missing)} requests, first {missing[0]}")
            said += [(state, self._turn(index, request, heard[i])) for i, (state, request) in asked.items()]
        if paired:
            coupled = [CoupledRequest(request=request, beside=other, ids=theirs.ids) for _, request, theirs in paired]
            completions = await self.sampler.couple(coupled)
            for (state, request, _), completion in zip(paired, completions, strict=True):
                said.append((state, self._turn(index, request, completion)))
                tick()
        return said

    async def _hear(self, states: Sequence[_State], index: int, address: tuple[str | int, ...]) -> list[tuple[_State, Turn]]:
        """Messages of a teammate without ids: they enter as text under its name and train nobody."""
        seat = self.seats[index]
        assert seat.speaker is not None
        replies = await seat.speaker.speak(
            [
                TextRequest(
                    messages=self.protocol.messages(state.play.task, state.turns, index, seat.system),
                    max_new_tokens=seat.max_new_tokens,
                    temperature=seat.temperature,
                    key=self._key(state, index, address),
                )
                for state in states
            ]
        )
        said: list[tuple[_State, Turn]] = []
        for state, reply in zip(states, replies, strict=True):
            if isinstance(reply, Failed):
                state.outcome = reply
                continue
            is_cut = reply.finish_reason == "length"
            turn = Turn(
                kind="observation",
                agent=seat.agent,
                seat=index,
                text=reply.text,
                finish_reason=reply.finish_reason,
                cut=is_cut,
            )
            said.append((state, turn))
        return said

    def _due(self, state: _State, until: AgentId | None) -> tuple[int, ...]:
        """Seats that speak now; nobody in an episode that failed, or after the last turn that `until` can have."""
        if state.outcome is not None or sum(turn.agent == until for turn in state.turns) >= self.protocol.own_turns:
            return ()
        try:
            return self.protocol.due(state.play.task, state.turns, state.rotation)
        except TaskFault as fault:
            state.outcome = Failed(reason=f"rule: {fault}")
            return ()

    async def play(
        self,
        plays: Sequence[Play],
        *,
        address: tuple[str | int, ...],
        versions: Mapping[AgentId, int],
        slots: Mapping[AgentId, Slot] | None = None,
        until: AgentId | None = None,
        substitute: Substitute | None = None,
        tick: Callable[[], None] = lambda: None,
        beside: Beside | None = None,
    ) -> list[Episode]:
        """Play every episode and grade it; the result has the order of `plays`.

        Args:
            address: start of every key (run seed, stage, agent, purpose); prompt, sibling, turn and speaker follow.
            versions: the team as promoted, written into each episode.
            slots: where each agent's weights are taken from (default: promoted).
            until: stop after the last turn that this agent can have (or at the episode's end) and grade nothing: the gate's
                probe episodes. Their outcome is `Failed("probe")`, so that they can never be trained on.
            substitute: gives a seat's message instead of its agent (seat ablation), or None to let the agent speak.
            tick: called once per message (progress, a request to stop).
            beside: episodes of another team in the order of `plays`, to be coupled with. What ends word for word as one of
                them has its outcome.
        """
        states = [
            _State(
                play=p,
                id="/".join(str(part) for part in (*address, p.task.id, p.sibling)),
                rotation=choice(key(*address, p.task.id, p.sibling, "rotation"), len(self.seats))
                if self.protocol.rotates
                else 0,
            )
            for p in plays
        ]
        for state, twin in zip(states, beside.episodes, strict=True) if beside is not None else ():
            state.twin = twin
        if len({state.id for state in states}) != len(states):
            raise BatonError("two episodes share an id; give the siblings of one prompt different numbers")
        live = states
        while live:
            due: dict[int, list[_State]] = {}
            still: list[_State] = []
            for state in live:
                seats = self._due(state, until)
                for seat in seats:
                    due.setdefault(seat, []).append(state)
                if seats:
                    still.append(state)
            said: list[tuple[_State, Turn]] = []
            for index in sorted(due):
                said += await self._wave(due[index], index, address, slots or {}, substitute, tick, beside)
            # Simultaneous speakers do not hear each other: turns are appended once all of them have spoken.
            for state, turn in said:
                state.turns.append(turn)
            for state in still:
                state.twin = _still(state)
            live = still
        answers = ["" if state.outcome is not None or until is not None else self._answer(state) for state in states]
        for state in states if until is None else ():
            twin = state.twin
            if twin is not None and len(twin.turns) == len(state.turns):
                state.outcome = twin.outcome
        graded = [i for i, state in enumerate(states) if state.outcome is None and until is None]
        for i, outcome in zip(graded, self.grade([(states[i].play.task, answers[i]) for i in graded]), strict=True):
            if isinstance(outcome, Scored) and self.protocol.is_cut(states[i].turns):
                outcome = Truncated(reward=outcome.reward, reason=outcome.reason)
            states[i].outcome = outcome
        return [
            Episode(
                id=state.id if beside is None else state.id + BESIDE,
                group=state.play.task.id,
                task_id=state.play.task.id,
                versions=versions,
                turns=tuple(state.turns),
                answer=answer,
                outcome=state.outcome or Failed(reason="probe"),
            )
            for state, answer in zip(states, answers, strict=True)
        ]

    def _answer(self, state: _State) -> str:
        return self.protocol.answer(state.turns, self.normalise, key(state.id, "tie"))


def _same_turn(state: _State, index: int) -> Turn | None:
    """What the other team's episode has at this place, while the transcripts are the same."""
    if state.twin is None:
        return None
    return next((t for t in state.twin.turns[len(state.turns) :] if t.seat == index), None)


def _still(state: _State) -> Episode | None:
    """The other team's episode, unless this one has parted from it."""
    twin = state.twin
    if twin is None or len(twin.turns) < len(state.turns):
        return None
    return twin if all(a.said == b.said for a, b in zip(state.turns, twin.turns, strict=False)) else None
