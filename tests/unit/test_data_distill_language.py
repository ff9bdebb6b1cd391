"""Which language a reasoning is in, whatever code and formulas stand in it; and the phrases that are shipped."""

from collections import Counter
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config import ConfigError
from megatron_rl.data.distill.language import LanguageJudge, language_name, language_share, num_letters, prose, windows
from megatron_rl.data.distill.phrases import SHIPPED, draw_phrase, instruction, load_phrases, shipped_texts

GERMAN = [
    "Ein Bäcker verkauft drei Dutzend Brötchen, und jedes davon kostet fünfundvierzig Cent.",
    "Ich rechne also zuerst aus, wie viele Brötchen das insgesamt sind, und multipliziere danach.",
    "Das ergibt einen Betrag von sechzehn Euro und zwanzig Cent, den ich jetzt buchen muss.",
    "Moment, ich sollte noch prüfen, ob die Öffnungszeiten für die Frage überhaupt wichtig sind.",
]
ENGLISH = [
    "A baker sells three dozen rolls, and each one of them costs forty-five cents.",
    "So first I work out how many rolls there are altogether, and then I multiply.",
    "That makes sixteen euros and twenty cents, which I now have to enter in the books.",
    "Wait, I should check whether the opening hours matter for the question at all.",
]
NOT_PROSE = [
    "```python\ndef income(dozens, price):\n    return dozens * 12 * price  # this comment is written in English\n```",
    "$$\\text{the total income of the baker} = 3 \\cdot 12 \\cdot 0.45$$",
    "\\[\\text{where the price is given in euros}\\]",
    "\\begin{align}\\text{this is where it all comes together}\\end{align}",
    '{"amount": "sixteen euros and twenty cents", "reason": "the baker sold all of the rolls"}',
    "`the_name_of_some_variable_here = another_function_of_it(first_argument)`",
    "https://example.org/how-to-bake-the-best-rolls-in-town/and-sell-them-all",
    "the_amount_that_was_booked and_another_name_with_underscores book_the_income(amount=16.2)",
]


@pytest.fixture(scope="module")
def judge() -> LanguageJudge:
    return LanguageJudge(["de", "en", "fr"])


def test_a_text_in_one_language_is_wholly_in_it(judge: LanguageJudge) -> None:
    for code, sentences in (("de", GERMAN), ("en", ENGLISH)):
        text = " ".join(sentences)
        assert judge.letters(text) == {code: num_letters(text)}
        assert language_share(judge.letters(text), code) == 1.0


@settings(max_examples=30)
@given(st.lists(st.sampled_from(NOT_PROSE), max_size=4), st.permutations(GERMAN), st.data())
def test_code_formulas_and_markup_do_not_count(
    judge: LanguageJudge, others: list[str], sentences: list[str], data: st.DataObject
) -> None:
    pieces = list(sentences)
    for other in others:
        pieces.insert(data.draw(st.integers(0, len(pieces))), f"\n{other}\n")
    text = " ".join(pieces)
    assert judge.letters(text) == {"de": num_letters(" ".join(GERMAN))}


def test_an_unfinished_code_block_is_left_out_and_prices_are_no_formula() -> None:
    assert prose("Also:\n```python\nreturn the result") == "Also:\n "
    assert prose("kostet 5$ und dann noch 6$ mehr") == "kostet 5$ und dann noch 6$ mehr"
    assert prose("mit $x + y$ gilt") == "mit   gilt"


def test_the_share_of_a_mixed_text_is_that_of_its_letters(judge: LanguageJudge) -> None:
    for num_german in range(5):
        sentences = GERMAN[:num_german] + ENGLISH[num_german:]
        letters = judge.letters(" ".join(sentences))
        expected = Counter({"de": num_letters("".join(GERMAN[:num_german]))})
        expected["en"] = num_letters("".join(ENGLISH[num_german:]))
        assert sum(letters.values()) == expected.total()
        share = language_share(letters, "de")
        # Windows of 80 letters: the one at the border may fall to either side.
        assert share is not None and abs(share - expected["de"] / expected.total()) <= 85 / expected.total()


def test_windows_keep_every_letter_and_chinese_letters_weigh_more() -> None:
    text = " ".join([*GERMAN, "Gut.", "Ja!"])
    assert sum(map(num_letters, windows(text))) == num_letters(text)
    assert min(map(num_letters, windows(text))) >= 80
    assert windows("Gut. Ja!") == ["Gut. Ja!"] and windows("12 + 3 = 15") == []
    assert num_letters("我们 ab1ß") == 2 * 3 + 3


def test_too_few_letters_are_not_judged(judge: LanguageJudge) -> None:
    assert language_share(judge.letters("So 36 * 0.45 = 16.2. Ok."), "de") is None
    assert language_share({}, "de") is None


def test_languages_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"a language must be one of af, .*de, .*, got xx; correct the column"):
        LanguageJudge(["de", "xx"])
    with pytest.raises(ConfigError, match=r"language\.others must leave at least two languages"):
        LanguageJudge(["de", "de"])
    assert language_name("de") == "German"


@pytest.mark.parametrize("language", SHIPPED)
def test_shipped_phrases_are_many_different_and_in_their_language(judge: LanguageJudge, language: str) -> None:
    phrases = load_phrases([])
    domains = {domain for code, domain in phrases if code == language}
    assert domains == {"general", "math", "code", "agentic", "writing"}
    every = [phrase for domain in domains for phrase in phrases[language, domain]]
    assert all(len(phrases[language, domain]) >= 16 for domain in domains)
    assert len(set(every)) == len(every)
    for domain in domains:
        letters = judge.letters("\n".join(phrases[language, domain]))
        assert language_share(letters, language) == 1.0, (domain, letters)
    assert set(shipped_texts(language)["backfill"]) == {"writer", "request", "checker", "answer"}
    assert language_share(judge.letters(instruction(language, "writer")), language) == 1.0


def test_a_phrase_depends_on_seed_and_sample_alone_and_all_are_drawn() -> None:
    phrases = load_phrases([])

    def draw(sample: int, seed: int = 0) -> str:
        return draw_phrase(phrases, language="de", domain="math", seed=seed, sample_id=str(sample))

    drawn = Counter(draw(sample) for sample in range(16_000))
    assert set(drawn) == set(phrases["de", "math"])
    # 1,000 of each expected; six standard deviations of a binomial.
    assert max(abs(count - 1000) for count in drawn.values()) < 6 * (1000 * 15 / 16) ** 0.5
    assert any(draw(sample, seed=1) != draw(sample) for sample in range(9))
    assert "de" in SHIPPED and instruction("fr", "writer") == instruction("en", "writer")


def test_own_phrases_replace_the_shipped_list_of_their_domain(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump({"language": "de", "phrases": {"math": ["Nun,"], "chemie": ["Die Formel lautet"]}}))
    phrases, shipped = load_phrases([str(path)]), load_phrases([])
    assert phrases["de", "math"] == ("Nun,",) and phrases["de", "chemie"] == ("Die Formel lautet",)
    assert phrases["de", "code"] == shipped["de", "code"] and phrases["en", "math"] == shipped["en", "math"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{phrases: {math: [a]}}", "must have `language`"),
        ("{language: de, phrases: {}}", "must have `language`"),
        ("{language: de, phrases: {math: []}}", "phrases.math must be a list with at least one"),
        ("{language: de, phrases: {math: ['Also, ']}}", "text without whitespace around it.*'Also, ' under math"),
        ("{language: de, phrases: {math: [1]}}", "got 1 under math"),
    ],
)
def test_a_file_of_phrases_that_does_not_fit_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"own\.yaml.*{message}"):
        load_phrases([str(path)])
