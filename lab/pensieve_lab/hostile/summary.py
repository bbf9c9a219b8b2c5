"""What all attacks of a run did to the stream and to the server's threads.

Owns: the figures of one run, the summary of all, and which figures exceed the limits.
Does not know: how runs are made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from pensieve_lab.hostile.answers import Answers
from pensieve_lab.hostile.watching import Gaps

DEVICE_PARTS: Final = ("ModelRunner.launch", "ModelRunner.choose", "ModelRunner.fetch")
"""Parts of the engine's loop that are the step itself, where the device is a CPU."""


class Limits(NamedTuple):
    """Limits of an attack's effect, beyond that of its control.

    Attributes:
      stall_ms: a gap of the stream.
      held_ms: processor time during which one thread is held.
    """

    stall_ms: float
    held_ms: float


class Run(NamedTuple):
    """The figures of one span of time.

    Attributes:
      seconds: its length.
      answers: the answers to the other clients.
      gaps: the gaps of the stream.
      held_ms: the longest slice of each part of the server's work; empty if none was noted.
      rss_mb: memory of the server at its end; 0 if it is not known.
    """

    seconds: float
    answers: Answers
    gaps: Gaps
    held_ms: Mapping[str, float]
    rss_mb: float

    @property
    def longest_held_ms(self) -> float:
        """Longest slice of a thread, the computation of steps left out."""
        return max((ms for part, ms in self.held_ms.items() if part not in DEVICE_PARTS), default=0.0)

    def in_words(self) -> str:
        gaps, held = self.gaps, sorted(self.held_ms.items(), key=lambda one: -one[1])
        codes = ", ".join(f"{number} x {code}" for code, number in self.answers.codes.most_common())
        return (
            f"{self.seconds:5.1f} s  {gaps.num:4d} gaps, p50 {gaps.p50_ms:5.1f}, max {gaps.max_ms:5.1f} ms  "
            f"{self.rss_mb:.0f} MB  held {', '.join(f'{part} {ms:.0f}' for part, ms in held[:3])}  {codes}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return {
            "seconds": round(self.seconds, 2),
            "answers": dict(self.answers.codes),
            "gaps": self.gaps._asdict(),
            "held": dict(self.held_ms),
            "rss_mb": self.rss_mb,
        }


class Attack(NamedTuple):
    """One attack, and the control of its group.

    Attributes:
      group, name: what was sent.
      control, run: the figures; of several runs, those of `repeated`.
      num_runs: how often it ran.
    """

    group: str
    name: str
    control: Run
    run: Run
    num_runs: int = 1

    def allowed_gap_ms(self, stall_ms: float) -> float:
        """Return the longest gap that the attack may cause, for a limit beyond the control's."""
        return self.control.gaps.max_ms + stall_ms

    def repeated(self, again: Attack) -> Attack:
        """Return the figures of this attack's runs and another one's.

        Other programs on the machine only lengthen gaps, so those of the run with the shortest longest gap
        count, of the control as of the attack. The longest slices and all wrong answers count.
        """
        return Attack(
            self.group,
            self.name,
            _calmer(self.control, again.control),
            _calmer(self.run, again.run),
            self.num_runs + again.num_runs,
        )


def _calmer(one: Run, other: Run) -> Run:
    calm, rough = (one, other) if one.gaps.max_ms <= other.gaps.max_ms else (other, one)
    held_ms = {
        part: max(calm.held_ms.get(part, 0.0), rough.held_ms.get(part, 0.0))
        for part in sorted(calm.held_ms.keys() | rough.held_ms.keys())
    }
    calm.answers.wrong += rough.answers.wrong
    failures = (*calm.gaps.failures, *rough.gaps.failures)
    return calm._replace(held_ms=held_ms, gaps=calm.gaps._replace(failures=failures))


def summary(quiet: Run, after: Run, attacks: Sequence[Attack]) -> dict[str, Any]:
    """Return the figures of the whole run; `quiet` and `after` are spans without other clients."""
    groups: dict[str, dict[str, Any]] = {}
    for group in dict.fromkeys(one.group for one in attacks):
        members = [one for one in attacks if one.group == group]
        control = members[0].control
        groups[group] = {
            "group": group,
            "requests": sum(one.run.answers.codes.total() for one in members),
            "longest_gap": max(one.run.gaps.max_ms for one in members),
            "longest_gap_of_control": control.gaps.max_ms,
            "longest_first": max(one.run.gaps.first_ms for one in members),
            "longest_first_of_control": control.gaps.first_ms,
            "longest_held": max(one.run.longest_held_ms for one in members),
            "longest_held_of_control": control.longest_held_ms,
            "control": control.as_dict(),
        }
    codes: Counter[str] = sum((one.run.answers.codes for one in attacks), Counter())
    return {
        "answers": dict(sorted(codes.items())),
        "typed_refusals": sum(
            number for code, number in codes.items() if code[0] == "4" or code[:3] == "503"
        ),
        "failed_turns": sum(number for code, number in codes.items() if code.endswith("grammar_failed")),
        "replies": codes["200"],
        "wrong": sum(len(one.run.answers.wrong) for one in attacks),
        "longest_gap": max((one.run.gaps.max_ms for one in attacks), default=0.0),
        "longest_gap_of_controls": max((one.control.gaps.max_ms for one in attacks), default=0.0),
        "longest_gap_without_others": max(quiet.gaps.max_ms, after.gaps.max_ms),
        "groups": groups,
        "attacks": {
            f"{one.group}: {one.name}": {**one.run.as_dict(), "runs": one.num_runs} for one in attacks
        },
        "without_attack": quiet.as_dict(),
        "afterwards": after.as_dict(),
    }


def problems(after: Run, attacks: Sequence[Attack], limits: Limits) -> list[str]:
    """Return a line for each answer that is wrong and each figure that exceeds its limit."""
    found = []
    for one in attacks:
        where = f"{one.group}: {one.name}"
        found += [f"{where}: {line}" for line in one.run.answers.wrong]
        found += [f"{where}: the stream failed: {line}" for line in one.run.gaps.failures]
        allowed_ms = one.allowed_gap_ms(limits.stall_ms)
        if one.run.gaps.max_ms > allowed_ms:
            found.append(
                f"{where}: a gap of {one.run.gaps.max_ms:.0f} ms; at most {allowed_ms:.0f} are allowed"
            )
        for part, ms in one.run.held_ms.items():
            allowed_ms = max(limits.held_ms, one.control.held_ms.get(part, 0.0))
            if part not in DEVICE_PARTS and ms > allowed_ms:
                found.append(f"{where}: {part} took {ms:.0f} ms; at most {allowed_ms:.0f} are allowed")
    controls = {one.group: one.control for one in attacks}
    for group, control in controls.items():
        found += [f"control of {group}: {line}" for line in control.answers.wrong]
    if after.gaps.texts != 1:
        found.append(f"the stream had {after.gaps.texts} different replies to one prompt")
    return found
