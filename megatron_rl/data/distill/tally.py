"""What came of the rows, counted by language and domain, as a table and as JSON."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.data.distill.language import MIN_LETTERS, language_share

DROPPED = "dropped: "
"""Starts the name of a count of drops with one reason."""


@dataclass
class Tally:
    """Counts by (language, domain)."""

    groups: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)

    def add(self, language: str, domain: str, counts: Mapping[str, int]) -> None:
        """Adds to one group."""
        self.groups.setdefault((language, domain), Counter()).update(counts)

    def total(self) -> Counter[str]:
        """Over all groups."""
        return sum(self.groups.values(), Counter())

    def as_json(self) -> dict[str, Any]:
        """{"total": counts, "groups": [{"language", "domain", counts}]}, each with the shares that follow."""
        groups = [
            {"language": language, "domain": domain, **_with_shares(counts)}
            for (language, domain), counts in self._sorted()
        ]
        return {"total": _with_shares(self.total()), "groups": groups}

    def lines(self, columns: Sequence[tuple[str, str]]) -> list[list[str]]:
        """Cells of a table: one line per group and one for all, `columns` are (title, count or share)."""
        lines = [[f"{language}/{domain}", *_cells(counts, columns)] for (language, domain), counts in self._sorted()]
        return [*lines, ["all", *_cells(self.total(), columns)]] if len(lines) > 1 else lines

    def drops(self) -> list[tuple[str, int]]:
        """(reason, how many), the most frequent first."""
        total = self.total()
        found = [(name.removeprefix(DROPPED), count) for name, count in total.items() if name.startswith(DROPPED)]
        return sorted(found, key=lambda pair: (-pair[1], pair[0]))

    def _sorted(self) -> list[tuple[tuple[str, str], Counter[str]]]:
        return sorted(self.groups.items())


SHARES = {
    "in_language_share": ("in_language", "judged"),
    "letters_share": ("letters_in_language", "letters"),
    "answers_in_language_share": ("answers_in_language", "answers_judged"),
    "agreed_share": ("agreed", "checked"),
}
"""Share -> (count, of how many)."""


def language_counts(letters: Mapping[str, int], language: str, min_share: float) -> dict[str, int]:
    """Counts of one reasoning: whether it could be judged, whether it stays in its language, and its letters."""
    share = language_share(letters, language)
    total = sum(letters.values())
    return {
        "judged": int(share is not None),
        "in_language": int(share is not None and share >= min_share),
        "letters": total if total >= MIN_LETTERS else 0,
        "letters_in_language": letters.get(language, 0) if total >= MIN_LETTERS else 0,
    }


def _with_shares(counts: Mapping[str, int]) -> dict[str, Any]:
    shares = {name: _share(counts, name) for name in SHARES if counts.get(SHARES[name][1])}
    return dict(sorted(counts.items())) | shares


def _share(counts: Mapping[str, int], name: str) -> float:
    part, whole = SHARES[name]
    return counts.get(part, 0) / counts[whole]


def _cells(counts: Mapping[str, int], columns: Sequence[tuple[str, str]]) -> list[str]:
    return [_cell(counts, name) for _, name in columns]


def _cell(counts: Mapping[str, int], name: str) -> str:
    if name == "dropped":
        return f"{sum(count for key, count in counts.items() if key.startswith(DROPPED)):,}"
    if name not in SHARES:
        return f"{counts.get(name, 0):,}"
    return f"{_share(counts, name):.1%}" if counts.get(SHARES[name][1]) else "–"
