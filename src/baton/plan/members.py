"""The agents whose weights are here: what of each decides about memory, disk and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from baton import assemble
from baton.assemble import Plan as Prepared
from baton.config import Config
from baton.engines import local, models
from baton.engines.adapters import LoraOptions
from baton.engines.table import symbols_of
from baton.plan.rehearsal import Rehearsal
from baton.records import Record
from baton.rollout import Seat
from baton.types import AgentId


@dataclass(frozen=True, kw_only=True)
class Member:
    """What of an agent with weights here decides about memory, disk and time. Bytes unless a name says otherwise."""

    agent: AgentId
    folder: Path
    """A model, or an adapter on one."""
    base: Path
    """The model; the folder itself where there is no adapter."""
    device: str
    lora: LoraOptions | None
    is_trained: bool
    learns: bool
    """Trained, or at least warm-started."""
    leaves: bool
    """Its learner leaves memory between its updates."""
    parameters: int
    """Its own: all of a model's, or an adapter's."""
    whole: int
    """Parameters of the model, or of the base."""
    served: int
    """Its own served weights, once."""
    layers: int
    width: int
    vocabulary: int
    kv_per_token: int
    """Keys and values of one token."""
    compute: local.Compute
    item: int
    """Bytes of one served number of the model, or of the base."""

    @property
    def serve(self) -> torch.dtype:
        return {2: torch.bfloat16, 4: torch.float32}.get(self.item, torch.float64)

    @property
    def serves_masters(self) -> bool:
        return self.item >= 4 or self.lora is not None

    @property
    def shared(self) -> int:
        """Of the base that adapters share."""
        return self.whole * self.item if self.lora else 0

    @property
    def learner(self) -> int:
        """Masters, and the served copy where that is something else."""
        return 4 * self.parameters + self.copy

    @property
    def copy(self) -> int:
        return 0 if self.serves_masters else self.served

    @property
    def largest(self) -> int:
        """Numbers of the largest trained tensor; of an adapter too few to count."""
        return 0 if self.lora else self.vocabulary * self.width

    @property
    def forward_flops(self) -> float:
        """Products and sums of one token's forward, attention over the context left out."""
        inside = self.whole - (self.vocabulary * self.width if self.layers else 0)
        return 2.0 * max(0, inside)


def present(prepared: Prepared, update: Rehearsal) -> list[Member]:
    """The agents whose weights are here, in the team's order."""
    config = prepared.config
    if config.engine.name == "table":
        return [_table(config, seat, update) for seat in prepared.seats if seat.codec is not None]
    folders = {
        agent.name: assemble.fresh_folder(prepared, i) for i, agent in enumerate(config.agents) if not agent.is_remote
    }
    serve, devices = assemble.serve_dtype(config, folders), assemble.devices_of(config)
    found: list[Member] = []
    for agent in config.agents:
        if agent.is_remote:
            continue
        folder, base = folders[agent.name], prepared.bases[agent.name]
        settings = _text_config(base)
        heads = int(settings["num_attention_heads"])
        head = int(settings.get("head_dim") or settings["hidden_size"] // heads)
        layers = int(settings["num_hidden_layers"])
        own = models.describe(folder).parameters
        found.append(
            Member(
                agent=agent.name,
                folder=folder,
                base=base,
                device=str(devices[agent.name]),
                lora=agent.lora,
                is_trained=agent.trainable,
                learns=agent.trainable or agent.warm_start is not None,
                leaves=agent.trainable and assemble.leaves(config, own),
                parameters=own,
                whole=prepared.parameters[agent.name],
                served=own * (4 if agent.lora else serve.itemsize),
                layers=layers,
                width=int(settings["hidden_size"]),
                vocabulary=int(settings["vocab_size"]),
                kv_per_token=2 * layers * int(settings.get("num_key_value_heads") or heads) * head * serve.itemsize,
                compute=assemble.compute(config, folders, devices[agent.name]),
                item=serve.itemsize,
            )
        )
    return found


def _table(config: Config, seat: Seat, update: Rehearsal) -> Member:
    """A table's rows are made as states are met: as many as there are different prompts, of 8 bytes a logit."""
    agent = next(a for a in config.agents if a.name == seat.agent)
    rows = len({turn.prompt_ids for turn in update.spoken(seat.agent)})
    size = rows * len(symbols_of(agent.model))
    return Member(
        agent=seat.agent,
        folder=Path(),
        base=Path(),
        device="cpu",
        lora=None,
        is_trained=agent.trainable,
        learns=agent.trainable,
        leaves=agent.trainable and assemble.leaves(config, 0),
        parameters=size,
        whole=size,
        served=8 * size,
        layers=0,
        width=0,
        vocabulary=0,
        kv_per_token=0,
        compute="float32",
        item=8,
    )


def record(prepared: Prepared, team: Sequence[Member]) -> list[Record]:
    """What each agent of the team is, in its order."""
    here = {m.agent: m for m in team}
    found: list[Record] = []
    for agent in prepared.config.agents:
        m = here.get(agent.name)
        kind = "endpoint" if m is None else "trained" if m.is_trained else "frozen"
        row: Record = {"agent": agent.name, "kind": kind, "max_new_tokens": agent.max_new_tokens}
        if m is not None:
            row |= {
                "parameters": m.parameters,
                "base_parameters": m.whole if m.lora else None,
                "serving": "float32 adapter on " * bool(m.lora) + str(m.serve).removeprefix("torch."),
                "compute": m.compute,
                "rests": m.leaves,
            }
        found.append(row)
    return found


def _text_config(folder: Path) -> dict[str, Any]:
    config = models.read_config(folder)
    return cast("dict[str, Any]", config.get("text_config") or config)
