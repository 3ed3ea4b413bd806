"""Recorded episodes against the plays that they should be of: who spoke when, what each was asked and said, the reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton import records
from baton.audit.findings import FAILED_EPISODE, FOREIGN, NOT_HEARD, Findings, Place
from baton.audit.subject import Subject
from baton.core.keyed import choice, key
from baton.engines.engine import Codec
from baton.errors import RunError, TaskFault
from baton.records import Record
from baton.rollout import Play, Seat, Substitute, Table
from baton.types import AgentId, Episode, Failed, Message, Truncated, Turn


@dataclass(frozen=True, kw_only=True)
class Playing:
    """How a batch of episodes was played, as `Table.play` was asked to."""

    table: Table
    address: tuple[str | int, ...]
    versions: Mapping[AgentId, int]
    until: AgentId | None = None
    substitute: Substitute | None = None
    drawn_from: str = "train"
    """The prompt set."""
    suffix: str = ""
    """Of the episodes' ids, behind what their keys begin with."""
    foreign: frozenset[AgentId] = frozenset()
    """Seats whose model is not kept in the run, nor its tokenizer."""


@dataclass(frozen=True)
class Part:
    """Rows of an episodes file that belong together."""

    file: str
    rows: Sequence[Record]
    first: int = 0
    """Rows of the file before them."""

    def cut(self, start: int, count: int) -> Part:
        """`count` of them from `start` on, or as many as there are."""
        return Part(self.file, self.rows[start : start + count], self.first + start)


class EpisodeFiles:
    """The episodes files of the run under audit."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._at_hand: tuple[str, list[Record]] | None = None
        self._encoded: dict[tuple[Any, ...], tuple[int, ...]] = {}

    def rows(self, file: str) -> list[Record]:
        """The rows of a file; the last one read is at hand. Raises RunError."""
        if self._at_hand is None or self._at_hand[0] != file:
            self._at_hand = (file, records.read_episodes(self.subject.run.path / file))
        return self._at_hand[1]

    def read(self, check: str, file: str) -> list[Record] | None:
        """The rows of a file that a check rests on, or None, and a fault, where it cannot be read."""
        found = self.subject.found
        found.ok("files")
        try:
            return self.rows(file)
        except RunError as error:
            found.at(file).wrong("files", str(error))
            found.skip(check, "its file cannot be read", 1, file)
            return None

    def check(
        self, part: Part, playing: Playing, plays: Sequence[Play], what: str, *, is_known: bool = False
    ) -> list[Episode]:
        """Rows as episodes, each checked against the play that it should be of, and graded again. What `is_known` was
        checked elsewhere and is only counted and read."""
        found = self.subject.found
        if len(part.rows) != len(plays):
            found.at(part.file).wrong("episodes", f"{what} episodes", len(part.rows), len(plays))
        episodes: list[Episode] = []
        graded: list[tuple[_Replay, str]] = []
        for number, row in enumerate(part.rows):
            here = found.at(part.file, f"row {part.first + number + 1}")
            with here.reading("episodes"):
                episode = records.read_episode(row)
                episodes.append(episode)
                if not episode.is_scored and row["reward"] is not None:
                    here.wrong("rewards", "a failed episode has a reward", row["reward"])
                if is_known or number >= len(plays):
                    continue
                found.ok("episodes")
                replay = _Replay(
                    here=here, row=row, episode=episode, playing=playing, play=plays[number], encode=self._encode
                )
                if replay.is_play(self.subject.sets):
                    answer = replay.answer()
                    if answer is not None:
                        graded.append((replay, answer))
        _grade(found, playing.table, graded)
        return episodes

    def _encode(self, codec: Codec, messages: Sequence[Message]) -> tuple[int, ...]:
        """`codec.encode`, once per conversation (siblings ask the same)."""
        at = (id(codec), *messages)
        if at not in self._encoded:
            if len(self._encoded) >= 4096:
                self._encoded.clear()
            self._encoded[at] = codec.encode(messages)
        return self._encoded[at]


def _grade(found: Findings, table: Table, items: Sequence[tuple[_Replay, str]]) -> None:
    """Grade answers again, all of a file at once."""
    if not items:
        return
    outcomes = table.grade([(replay.play.task, answer) for replay, answer in items])
    for (replay, _), outcome in zip(items, outcomes, strict=True):
        here, episode = replay.here, replay.episode
        if isinstance(outcome, Failed) or outcome.reason.startswith("late"):
            found.skip("rewards", f"the grader gave no reward here: {outcome.reason}", 1, here)
            continue
        if not isinstance(episode.outcome, Failed) and episode.outcome.reason.startswith("late"):
            found.skip("rewards", "the run's grader was late, this one was not", 1, here)
            continue
        found.ok("rewards")
        here.compare("rewards", f"reward of the answer {_few(episode.answer)}", episode.reward, outcome.reward)


# ---- one episode -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Replay:
    """One recorded episode beside the play that it should be of."""

    here: Place
    row: Record
    episode: Episode
    playing: Playing
    play: Play
    encode: Callable[[Codec, Sequence[Message]], tuple[int, ...]]

    def is_play(self, sets: Mapping[str, str]) -> bool:
        """Whether the row is of the task that was drawn for it."""
        episode, playing, task = self.episode, self.playing, self.play.task
        if episode.task_id != task.id:
            of = sets.get(episode.task_id)
            home = "of no set" if of is None else f"of the {of} set"
            told = f"the task is {home}, these are drawn from {playing.drawn_from}" if of != playing.drawn_from else "task"
            self.here.wrong("episodes", f"{told}: task_id", episode.task_id, task.id)
            return False
        ours = {"id": self.row["id"], "prompt": self.row["prompt"], "versions": dict(episode.versions)}
        computed = {"id": self.address + playing.suffix, "prompt": task.prompt, "versions": dict(playing.versions)}
        return self.here.compare("episodes", "", ours, computed)

    @property
    def address(self) -> str:
        """Where the episode's own keys begin, as text."""
        return "/".join(str(part) for part in (*self.playing.address, self.play.task.id, self.play.sibling))

    def answer(self) -> str | None:
        """Replay who spoke when, what each was asked and said. Gives the answer to grade; None where nothing is graded."""
        here, episode, playing, task = self.here, self.episode, self.playing, self.play.task
        table, protocol = playing.table, playing.table.protocol
        failure = episode.outcome.reason if isinstance(episode.outcome, Failed) else ""
        if failure and (playing.until is None or failure != "probe") and not failure.startswith("rule: "):
            here.found.skip("episodes", FAILED_EPISODE, 1, here)
            return None
        rotation = 0
        if protocol.rotates:
            rotation = choice(key(*playing.address, task.id, self.play.sibling, "rotation"), len(table.seats))
        done: list[Turn] = []
        left = list(episode.turns)
        while True:
            own = sum(turn.agent == playing.until for turn in done)
            is_over = playing.until is not None and own >= protocol.own_turns
            try:
                due = () if is_over else protocol.due(task, done, rotation)
            except TaskFault as fault:
                here.compare("episodes", "failure", failure, f"rule: {fault}")
                if left:
                    here.wrong("episodes", f"{len(left)} turns after the rule had failed")
                return None
            if not due:
                break
            said: list[Turn] = []
            for index in sorted(due):
                if not left:
                    here.wrong("episodes", f"turn {len(episode.turns) + 1} of seat {index + 1} is missing")
                    return None
                turn = left.pop(0)
                said.append(turn)
                if not self._is_turn(f"turn {len(done) + len(said)}", turn, index, done):
                    return None
            done += said
        if left:
            here.wrong("episodes", f"{len(left)} turns more than the protocol has")
            return None
        if failure.startswith("rule: "):
            here.wrong("episodes", "the rule does not fail here", failure)
            return None
        if playing.until is not None:
            if episode.outcome != Failed(reason="probe") or episode.answer:
                here.wrong("episodes", "a probe episode has an outcome or an answer", episode.answer)
            return None
        answer = protocol.answer(done, table.normalise, key(self.address, "tie"))
        here.compare("episodes", "answer", episode.answer, answer)
        here.compare("episodes", "truncated", isinstance(episode.outcome, Truncated), protocol.is_cut(done))
        return answer

    def _is_turn(self, at: str, turn: Turn, index: int, before: Sequence[Turn]) -> bool:
        """One message of the seat at `index` after those before; False where what follows it cannot be judged."""
        here, playing, task = self.here, self.playing, self.play.task
        seat = playing.table.seats[index]
        if (turn.seat, turn.agent) != (index, seat.agent):
            recorded, computed = f"{turn.agent} in seat {turn.seat}", f"{seat.agent} in seat {index}"
            here.wrong("episodes", f"{at}: who speaks", recorded, computed)
            return False
        text = None
        if playing.substitute is not None:
            drawn = key(*playing.address, self.episode.id, len(before), "substitute")
            text = playing.substitute(task, index, drawn)
        if text is None and seat.speaker is not None:
            here.found.skip("episodes", NOT_HEARD, 1, here)
            ours = {"kind": turn.kind, "versions": list(turn.versions), "cut": turn.cut}
            said = {"kind": "observation", "versions": [], "cut": turn.finish_reason == "length"}
            return here.compare("episodes", at, ours, said)
        if text is not None or turn.kind != "action":
            ours = {"kind": turn.kind, "text": turn.text}
            return here.compare("episodes", at, ours, {"kind": "observation", "text": text})
        if seat.agent in playing.foreign:
            here.found.skip("episodes", FOREIGN, 1, here.file)
            return True
        if seat.codec is None:
            here.wrong("episodes", f"{at}: sampled ids of '{seat.agent}', which has no model here")
            return False
        self._sampled(at, turn, seat, seat.codec, playing.table.protocol.messages(task, before, index, seat.system))
        return True

    def _sampled(self, at: str, turn: Turn, seat: Seat, codec: Codec, asked: Sequence[Message]) -> None:
        """The ids of a message that an agent sampled: what it was asked, where it ends, and that the text is theirs."""
        here = self.here
        prompt = self.encode(codec, asked)
        ends = turn.ids[-1] in codec.end_ids if turn.ids else False
        is_full = len(turn.ids) == seat.max_new_tokens
        computed = {
            "text": codec.decode(turn.ids),
            "versions": [self.playing.versions[seat.agent]] * len(turn.ids),
            "finish_reason": "stop" if ends else "length",
            "cut": not ends and seat.max_new_tokens > 1,
        }
        ours = {"text": turn.text, "versions": list(turn.versions), "finish_reason": turn.finish_reason, "cut": turn.cut}
        if ours["text"] != computed["text"]:
            told = f"{at}: the text is not that of the sampled ids {_few(turn.ids)}: text"
            here.wrong("episodes", told, turn.text, computed["text"])
            ours["text"] = computed["text"]
        here.compare("episodes", at, ours, computed)
        if not turn.ids or len(turn.ids) > seat.max_new_tokens or not (ends or is_full):
            what = f"{at}: number of sampled ids, of {seat.max_new_tokens} at most and fewer only with an end token"
            here.wrong("episodes", what, len(turn.ids))
        if any(i in codec.end_ids for i in turn.ids[:-1]):
            here.wrong("episodes", f"{at}: goes on after an end token")
        if turn.prompt_ids != prompt:
            told = f"{at}: the prompt is not what '{seat.agent}' is shown: prompt_ids"
            here.wrong("episodes", told, _few(turn.prompt_ids), _few(prompt))


def _few(value: Sequence[int] | str) -> str:
    """A long text or list of ids in a line."""
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:37] + "...")
    return str(list(value) if len(value) <= 12 else [*value[:11], "..."])
