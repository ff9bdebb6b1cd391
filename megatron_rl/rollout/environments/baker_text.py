"""The words of the baker task: who sells what, how it is told and asked. No numbers are chosen here."""

import random
from dataclasses import dataclass
from typing import Literal

Level = Literal["easy", "full"]


@dataclass(frozen=True)
class Person:
    name: str
    pronoun: str
    possessive: str


@dataclass(frozen=True)
class Good:
    plural: str
    singular: str
    every: str
    """Jedes, Jede or Jeder, in agreement with the singular."""


def _people(names: str, pronoun: str, possessive: str) -> list[Person]:
    return [Person(name.strip(), pronoun, possessive) for name in names.split(",")]


def _goods(words: str) -> list[Good]:
    return [Good(*word.split("/")) for word in words.split()]


PEOPLE: dict[Level, list[Person]] = {
    "easy": _people("Ein Bäcker, Herr Weber, Opa Karl", "er", "sein")
    + _people("Eine Bäckerin, Frau Lang, Tante Inge", "sie", "ihr"),
}
PEOPLE["full"] = (
    PEOPLE["easy"]
    + _people("Herr Demir, Onkel Paul, Bäcker Möller, Jonas, Der Lehrling", "er", "sein")
    + _people("Frau Öztürk, Oma Grete, Meisterin Roth, Mira, Die Verkäuferin", "sie", "ihr")
)

OCCASIONS: dict[Level, list[str]] = {"easy": ["", "heute", "am Montag", "am Markt"]}
OCCASIONS["full"] = OCCASIONS["easy"] + [
    "am Samstag",
    "auf dem Stadtfest",
    "vor der Schule",
    "bis zum Mittag",
    "in der Adventszeit",
    "an einem Regentag",
]

SMALL: dict[Level, list[Good]] = {
    "easy": _goods(
        "Brötchen/Brötchen/Jedes Brezeln/Brezel/Jede Hörnchen/Hörnchen/Jedes Semmeln/Semmel/Jede "
        "Krapfen/Krapfen/Jeder Muffins/Muffin/Jeder"
    )
}
SMALL["full"] = SMALL["easy"] + _goods(
    "Mohnschnecken/Mohnschnecke/Jede Laugenstangen/Laugenstange/Jede Plätzchen/Plätzchen/Jedes "
    "Windbeutel/Windbeutel/Jeder"
)
BIG: dict[Level, list[Good]] = {
    "easy": _goods(
        "Brote/Brot/Jedes Torten/Torte/Jede Kuchen/Kuchen/Jeder Stollen/Stollen/Jeder Baguettes/Baguette/Jedes"
    )
}
BIG["full"] = BIG["easy"] + _goods(
    "Zöpfe/Zopf/Jeder Fladenbrote/Fladenbrot/Jedes Apfeltaschen/Apfeltasche/Jede Tortenböden/Tortenboden/Jeder"
)

QUESTIONS: dict[Level, list[str]] = {
    "easy": ["Wie hoch ist das Einkommen?", "Wie viel nimmt {pronoun} ein?", "Was ist der Umsatz?"]
}
QUESTIONS["full"] = QUESTIONS["easy"] + [
    "Wie hoch ist {possessive}e Einnahme?",
    "Wie viel Geld liegt danach in der Kasse, wenn sie vorher leer war?",
    "Welchen Betrag hat {pronoun} verdient?",
]
INSTRUCTION = "Buche den Betrag mit buche_einnahme."

PRICE_FORMS: dict[Level, list[str]] = {"easy": ["Ein Stück kostet {price} €."]}
PRICE_FORMS["full"] = PRICE_FORMS["easy"] + [
    "{every} {singular} kostet {price} €.",
    "Der Preis je Stück beträgt {price} €.",
    "Verlangt werden {price} € pro Stück.",
]

DISTRACTORS = [
    "Die Bäckerei öffnet um {hour} Uhr.",
    "Das Geschäft schließt um {late} Uhr.",
    "Draußen sind es {degrees} Grad.",
    "Der Laden besteht seit {years} Jahren.",
    "In der Backstube arbeiten {few} Leute.",
    "Der Ofen braucht {minutes} Minuten zum Aufheizen.",
    "Bis zum Bahnhof sind es {minutes} Schritte.",
    "Gestern kamen {degrees} Kunden.",
    "Der Mehlsack wiegt {years} kg.",
    "Die Straßenbahn hält alle {few} Minuten.",
    "Am Fenster sitzt eine Katze.",
    "Es regnet seit dem Morgen.",
    "Die Nachbarin grüßt freundlich.",
]
_DISTRACTOR_NUMBERS = {"hour": (5, 8), "late": (16, 19), "degrees": (3, 31), "years": (10, 80), "few": (2, 9)}
_DISTRACTOR_NUMBERS["minutes"] = (15, 90)

_NUMERALS = {2: "zwei", 3: "drei", 4: "vier", 5: "fünf", 6: "sechs", 7: "sieben", 8: "acht", 9: "neun"}


@dataclass(frozen=True)
class Wording:
    """Everything of a problem but its numbers and its distractors."""

    kind: str
    person: Person
    occasion: str
    goods: tuple[Good, ...]
    price_form: str
    """Empty for kinds whose story states the price itself: equal texts must have equal keys."""
    question: str
    numerals: bool
    """Quantities up to nine as words: drei Dutzend."""

    def key(self) -> str:
        """Identity of the text. Problems with equal keys differ in numbers, numerals and distractors only."""
        goods = [good.plural for good in self.goods]
        return "|".join([self.kind, self.person.name, self.occasion, *goods, self.price_form, self.question])

    def sells(self) -> str:
        """Subject, verb and occasion: Frau Lang verkauft am Montag"""
        return " ".join(part for part in (self.person.name, "verkauft", self.occasion) if part)

    def price(self, index: int, cents: int) -> str:
        """The sentence that prices the index-th good."""
        good = self.goods[index]
        return self.price_form.format(every=good.every, singular=good.singular, price=euros(cents))

    def count(self, number: int) -> str:
        """A quantity in figures, or in words where this wording uses them."""
        return _NUMERALS.get(number, str(number)) if self.numerals else str(number)

    def ask(self) -> str:
        """The question and what to do with its answer."""
        return f"{self.question.format(pronoun=self.person.pronoun, possessive=self.person.possessive)} {INSTRUCTION}"


def draw_wording(
    kind: str, sizes: tuple[str, ...], level: Level, rng: random.Random, *, price_sentence: bool
) -> Wording:
    """A random wording; sizes names the shelf of each good: "small" (by the dozen) or "big"."""
    goods: list[Good] = []
    for size in sizes:
        shelf = SMALL[level] if size == "small" else BIG[level]
        goods.append(rng.choice([good for good in shelf if good not in goods]))
    return Wording(
        kind=kind,
        person=rng.choice(PEOPLE[level]),
        occasion=rng.choice(OCCASIONS[level]),
        goods=tuple(goods),
        price_form=rng.choice(PRICE_FORMS[level]) if price_sentence else "",
        question=rng.choice(QUESTIONS[level]),
        numerals=level == "full" and rng.random() < 0.5,
    )


def draw_distractor(rng: random.Random) -> str:
    """A sentence that does not matter, often with a number in it."""
    numbers = {name: rng.randint(*bounds) for name, bounds in _DISTRACTOR_NUMBERS.items()}
    return rng.choice(DISTRACTORS).format(**numbers)


def euros(cents: int) -> str:
    """1440 -> 14,40"""
    return f"{cents // 100},{cents % 100:02d}"
