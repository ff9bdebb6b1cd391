"""Word problems of the baker task: kinds, number ranges, held-out splits.

What the splits test. Two things of a problem are held out by their hash (splits.py), each on its own:
- its text: kind, person, occasion, goods, price sentence and question together (Wording.key);
- its pairs: each quantity with the price in cents that multiplies it, e.g. 36 x 40.

| split | text | pairs |
|---|---|---|
| train | known | all known |
| new_texts | held out | all known: every multiplication may have been seen in training, in other words |
| new_numbers | known | all held out: no multiplication was seen in training, in no kind and at no level |

So new_texts asks for the same sums told anew (its words are known, their combination is not), new_numbers for
multiplications never practised. Sums of two held-out products may recur. Distractors and number words are not
part of a text's identity, so a held-out text was not seen with other distractors either.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_rl.rollout.environments.baker_text import Level, Wording, draw_distractor, draw_wording, euros
from megatron_rl.rollout.environments.splits import is_held_out

Split = Literal["train", "new_texts", "new_numbers"]
SPLITS: tuple[Split, ...] = ("train", "new_texts", "new_numbers")

Pair = tuple[int, int]
"""(quantity, price in cents)"""


@dataclass(frozen=True)
class Numbers:
    """The arithmetic of a problem."""

    kind: str
    pairs: tuple[Pair, ...]
    sent_back: int = 0
    """Pieces that came back unsold, of kind "returned"; the pair counts what stayed sold."""

    @property
    def answer_cents(self) -> int:
        """The amount to book."""
        return sum(quantity * cents for quantity, cents in self.pairs)

    def to_task(self) -> dict[str, Any]:
        """As plain data, for Prompt.task."""
        return {"kind": self.kind, "pairs": [list(pair) for pair in self.pairs], "sent_back": self.sent_back}

    @classmethod
    def from_task(cls, task: dict[str, Any]) -> "Numbers":
        """What to_task gave."""
        return cls(task["kind"], tuple((quantity, cents) for quantity, cents in task["pairs"]), task["sent_back"])


@dataclass(frozen=True)
class Problem:
    """One word problem and its solution."""

    wording: Wording
    numbers: Numbers
    before: tuple[str, ...] = ()
    """Distractors in front of the story. None goes between a good and its price: "Ein Stück" must stay clear."""
    after: tuple[str, ...] = ()
    """Distractors between the story and the question."""

    def text(self) -> str:
        """What the user asks."""
        story = KINDS[self.numbers.kind].story(self.wording, self.numbers)
        return " ".join([*self.before, *story, *self.after, self.wording.ask()])


@dataclass(frozen=True)
class Kind:
    """One way to build a problem."""

    sizes: tuple[str, ...]
    """One per pair: "small" or "big" goods."""
    story: Callable[[Wording, Numbers], list[str]]
    """Its sentences, without distractors and question."""
    opening: Callable[[Numbers], list[str]] = lambda numbers: []
    """Steps of the working before the multiplications."""
    price_sentence: bool = True
    """The price has a sentence of its own, which comes in several forms."""


def _tell_dozen(wording: Wording, numbers: Numbers) -> list[str]:
    quantity, cents = numbers.pairs[0]
    dozens = "ein halbes" if quantity == 6 else wording.count(quantity // 12)
    return [f"{wording.sells()} {dozens} Dutzend {wording.goods[0].plural}.", wording.price(0, cents)]


def _open_dozen(numbers: Numbers) -> list[str]:
    quantity = numbers.pairs[0][0]
    return ["Ein halbes Dutzend sind 6." if quantity == 6 else f"{quantity // 12} Dutzend sind {quantity}."]


def _tell_single(wording: Wording, numbers: Numbers) -> list[str]:
    quantity, cents = numbers.pairs[0]
    return [f"{wording.sells()} {wording.count(quantity)} {wording.goods[0].plural}.", wording.price(0, cents)]


def _tell_several(wording: Wording, numbers: Numbers) -> list[str]:
    parts = [
        f"{wording.count(quantity)} {good.plural} für je {euros(cents)} €"
        for (quantity, cents), good in zip(numbers.pairs, wording.goods, strict=True)
    ]
    return [f"{wording.sells()} {', '.join(parts[:-1])} und {parts[-1]}."]


def _tell_per_dozen(wording: Wording, numbers: Numbers) -> list[str]:
    dozens, cents = numbers.pairs[0]
    return [
        f"{wording.sells()} {wording.count(dozens)} Dutzend {wording.goods[0].plural}.",
        f"Ein Dutzend kostet {euros(cents)} €.",
    ]


def _tell_returned(wording: Wording, numbers: Numbers) -> list[str]:
    quantity, cents = numbers.pairs[0]
    return [
        f"{wording.sells()} {quantity + numbers.sent_back} {wording.goods[0].plural}.",
        wording.price(0, cents),
        f"{wording.count(numbers.sent_back).capitalize()} davon werden zurückgegeben und erstattet.",
    ]


def _open_returned(numbers: Numbers) -> list[str]:
    quantity, sent_back = numbers.pairs[0][0], numbers.sent_back
    return [f"{quantity + sent_back} minus {sent_back} sind {quantity}."]


KINDS: dict[str, Kind] = {
    "dozen": Kind(("small",), _tell_dozen, _open_dozen),
    "single": Kind(("big",), _tell_single),
    "two_goods": Kind(("big", "small"), _tell_several, price_sentence=False),
    "three_goods": Kind(("big", "small", "small"), _tell_several, price_sentence=False),
    "per_dozen": Kind(("small",), _tell_per_dozen, price_sentence=False),
    "returned": Kind(("small",), _tell_returned, _open_returned),
}

_SMALL_PRICES, _BIG_PRICES = range(5, 100, 5), range(105, 1500, 5)
RANGES: dict[Level, dict[str, list[tuple[Sequence[int], Sequence[int]]]]] = {
    "easy": {
        "dozen": [(range(12, 49, 12), range(10, 91, 10))],
        "single": [(range(2, 7), range(100, 451, 50))],
        "two_goods": [(range(2, 5), range(100, 501, 100)), (range(2, 5), range(10, 51, 10))],
    },
    "full": {
        "dozen": [((6, *range(12, 121, 12)), _SMALL_PRICES)],
        "single": [(range(2, 26), _BIG_PRICES)],
        "two_goods": [(range(2, 10), _BIG_PRICES), (range(2, 20), _SMALL_PRICES)],
        "three_goods": [(range(2, 6), _BIG_PRICES), (range(2, 10), _SMALL_PRICES), (range(2, 10), _SMALL_PRICES)],
        "per_dozen": [(range(2, 10), range(240, 960, 5))],
        "returned": [(range(6, 41), _SMALL_PRICES)],
    },
}
"""Level -> kind -> (quantities, prices in cents) of each pair. A dozen's quantity counts pieces."""


_PAIR_SALT = "baker/pair/26"
"""Easy kinds have few pairs; of the first 60 salts this one holds out nearest to a fifth of each kind's."""


class ProblemSource:
    """Draws problems of one level and some kinds, for any split."""

    def __init__(self, level: Level, kinds: Sequence[str], distractor_share: float) -> None:
        """distractor_share: share of problems with one or two sentences that do not matter."""
        self.level: Level = level
        self.kinds = list(kinds)
        self.distractor_share = distractor_share
        self._pairs: dict[tuple[str, int, bool], list[Pair]] = {}
        for kind in self.kinds:
            for slot, (quantities, prices) in enumerate(RANGES[level][kind]):
                for pair in [(quantity, cents) for quantity in quantities for cents in prices]:
                    self._pairs.setdefault((kind, slot, is_held_out(_PAIR_SALT, pair_key(pair))), []).append(pair)

    def draw(self, split: Split, rng: random.Random) -> Problem:
        """A problem of the split, every kind equally often."""
        name = rng.choice(self.kinds)
        sizes = KINDS[name].sizes
        pairs = tuple(rng.choice(self._pairs[name, slot, split == "new_numbers"]) for slot in range(len(sizes)))
        wording = self._draw_wording(name, rng)
        while is_held_out("baker/text", wording.key()) != (split == "new_texts"):
            wording = self._draw_wording(name, rng)
        numbers = Numbers(name, pairs, sent_back=rng.randint(2, 5) if name == "returned" else 0)
        before, after = [], []
        for _ in range(rng.randint(1, 2) if rng.random() < self.distractor_share else 0):
            rng.choice([before, after]).append(draw_distractor(rng))
        return Problem(wording, numbers, tuple(before), tuple(after))

    def _draw_wording(self, kind: str, rng: random.Random) -> Wording:
        return draw_wording(kind, KINDS[kind].sizes, self.level, rng, price_sentence=KINDS[kind].price_sentence)


def pair_key(pair: Pair) -> str:
    """Identity of a multiplication, whatever story tells it."""
    return f"{pair[0]}x{pair[1]}"


def working(numbers: Numbers, result_cents: int) -> str:
    """A short German working that ends in result_cents, right or wrong: 3 Dutzend sind 36. 36 mal 0,40 ist 14,40."""
    steps = KINDS[numbers.kind].opening(numbers)
    single = len(numbers.pairs) == 1
    for quantity, cents in numbers.pairs:
        steps.append(f"{quantity} mal {euros(cents)} ist {euros(result_cents if single else quantity * cents)}.")
    if not single:
        steps.append(f"Summe {euros(result_cents)}.")
    return " ".join(steps)
