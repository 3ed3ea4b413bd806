"""What became of a seat or of a whole team, as lines: a swap, an undo, a distillation."""

from __future__ import annotations

from collections.abc import Sequence

from baton.console import decimal, interval, table
from baton.records import Record

# ---- a swap -----------------------------------------------------------------------------------------------------


def _accuracy(found: Record) -> str:
    return f"{decimal(found['value'])} {interval(found['low'], found['high'])}"


def swap_lines(record: Record, more: Record | None) -> list[str]:
    """A swap as a person reads it: what it was, the team before, right after and later, and the other seats' weights."""
    agent, accuracy = record["agent"], record["accuracy"]
    lines = [
        f"{agent}: {record['model_before']} ({record['parameters_before']:,} parameters) -> {record['model']} "
        f"({record['parameters']:,}), mode {record['mode']}, after stage {record['stages']}"
    ]
    if (gate := record.get("gate")) is not None:
        lines.append(
            f"gate: mean {decimal(gate['message_mean'])} of {gate['radius_message_mean']:g} nats, quantile "
            f"{decimal(gate['q_gate'])} of {gate['radius_token']:g}, after {len(record['rounds'])} rounds"
        )
    elif record.get("bound") is not None:
        bound = record["bound"]["kl_served_incumbent"]
        lines.append(f"both models run: in every state at most {bound:g} nats from the one before; the seat is not trained")
    else:
        lines.append("no gate: nothing says how far it speaks from the one before")
    rows = [("before", _accuracy(accuracy["before"]), ""), ("right after", _accuracy(accuracy["after"]), "")]
    difference = accuracy["difference"]
    change, low, high = (
        f"{'-' if difference[n] < 0 else '+'}{decimal(abs(difference[n]))}" for n in ("value", "low", "high")
    )
    rows[1] = (*rows[1][:2], f"{change} [{low}, {high}]")
    if more is not None:
        rows.append((f"{more['stages']} stages later", _accuracy(more["accuracy"]), ""))
    width = max(len(name) for name, _, _ in rows)
    lines += ["", *(f"{name.ljust(width)}  {value}  {note}".rstrip() for name, value, note in rows), ""]
    if (pairs := record.get("pairs")) is not None:
        lines.append(f"{pairs['n']} pairs: {pairs['discordance']:.1%} differ; not worse by what they can show")
    for name, mark in record["fingerprints"].items():
        if name != agent:
            kept = "unchanged" if mark == record["fingerprints_before"][name] else "CHANGED"
            lines.append(f"weights of {name}: {mark[:12]} {kept}")
    spent = record["tokens"]
    told = f"tokens: {spent['played']:,} played, {spent['trained']:,} read in training"
    if more is not None:
        told += f"; {more['training_tokens']:,} generated in the stages since"
    return [*lines, told, f"prompts of this table: {accuracy['prompts']} of the test set; intervals 95 %"]


def undone_lines(record: Record) -> list[str]:
    """A swap that was taken back."""
    swap = record["undone"]
    return [
        f"{swap['agent']}: {swap['model']} leaves its seat, {swap['model_before']} has it again, bit for bit",
        f"the run stands after stage {record['stages']}; what came after the swap stays in {record['left']}",
    ]


# ---- a distillation ----------------------------------------------------------------------------------------------


def distill_lines(record: Record) -> list[str]:
    """A team and the one model that was taught it, on the same prompts: accuracy, what an answer costs, what was kept."""
    size, imitation, rounds = record["parameters"], record["imitation"], record["on_policy"]["rounds"]
    # Tables have no parameters.
    own, theirs = (f" ({n:,} parameters)" if n else "" for n in (size["student"], size["team"]))
    kept_of = "" if record["options"]["keep"] == "all" else " of the highest reward"
    lines = [
        f"{record['model']}{own} after a {record['protocol']} of {len(record['versions'])}{theirs}",
        f"imitation: {imitation['steps']} steps on {imitation['messages']} plays of the team{kept_of}, held-out accuracy "
        f"{decimal(imitation['accuracy'][0][1])} -> {decimal(imitation['accuracy'][-1][1])}",
    ]
    if imitation["longer_than_limit"]:
        limit = record["options"]["max_new_tokens"]
        lines.append(f"  {imitation['longer_than_limit']} of them are longer than max_new_tokens = {limit} and were cut")
    if rounds:
        lines.append(
            f"on-policy: {len(rounds)} rounds after {', '.join(record['on_policy']['teachers'])}, KL(teacher || student) "
            f"{decimal(rounds[0]['first_loss'])} -> {decimal(rounds[-1]['last_loss'])} nats a token"
        )
    else:
        lines.append(f"imitation alone: {record['on_policy']['why_not']}")
    rows: list[Sequence[str]] = [["", "accuracy", "95 %", "minus the team", "tokens/answer", "read/answer", "failed"]]
    for row in record["rows"]:
        lead = row["difference"]
        rows.append(
            [
                row["name"],
                decimal(row["value"]),
                interval(row["low"], row["high"]),
                "-" if lead is None else f"{-lead[0]:+.3f} {interval(-lead[2], -lead[1])}",
                f"{row['tokens_per_answer']:.1f}",
                f"{row['read_per_answer']:.0f}",
                str(row["failed"]),
            ]
        )
    kept = record["kept"]
    shares = ["-" if kept[k] is None else f"{kept[k]:.1%}" for k in ("value", "tokens_per_answer", "read_per_answer")]
    lines += ["", *table(rows, right=(1, 3, 4, 5, 6)), ""]
    lines.append(f"the student has {shares[0]} of the team's accuracy, for {shares[1]} of its tokens, reading {shares[2]}")
    spent = record["tokens"]
    lines.append(
        f"tokens: {spent['played']:,} by the team, {spent['sampled']:,} by the student, {spent['trained']:,} read in "
        "training"
    )
    return [*lines, f"prompts of this table: {record['prompts']} of the test set; the student is in {record['folder']}"]
