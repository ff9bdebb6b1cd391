"""The reference page holds every key of every nested model with type, default and meaning."""

from typing import Annotated, Literal

from pydantic import Field

from megatron_rl.config import ConfigModel
from megatron_rl.config.reference import config_reference, fields_without_description


class Leaf(ConfigModel):
    """A leaf with a
    long line."""

    mode: Literal["a", "b"] = "a"
    """One of a|b."""
    bound: float | None = Field(gt=0, default=None)
    """Upper
    bound."""


class Node(ConfigModel):
    """A node."""

    leaf: Leaf = Leaf()
    """The leaf."""
    leaves: list[Leaf] = []
    """Many leaves."""
    by_name: dict[str, Leaf] | None = None
    """Named leaves."""
    child: "Node | None" = None
    """A node of the same kind."""
    count: Annotated[int, Field(ge=1, le=9)]
    """How many."""
    names: list[str] = Field(default_factory=lambda: ["x"], min_length=1)
    """Names."""


class Ring(ConfigModel):
    """Contains itself through another model."""

    link: "Link | None" = None
    """Link."""


class Link(ConfigModel):
    """Goes back."""

    ring: Ring | None = None
    """Ring."""


Ring.model_rebuild()


class Clip(ConfigModel):
    """Clips | cuts."""

    kind: Literal["clip"] = "clip"
    """Tag."""
    leaf: Leaf = Leaf()
    """Own leaf."""


class Cap(ConfigModel):
    """Caps."""

    kind: Literal["cap"] = "cap"
    """Tag."""
    high: float = Field(ge=1, default=2.0)
    """Largest."""


class Off(ConfigModel):
    """Nothing."""

    kind: Literal["off"] = "off"
    """Tag."""


class Chooser(ConfigModel):
    """Has choices."""

    guard: Annotated[Clip | Cap | Off, Field(discriminator="kind")] = Off()
    """Which guard."""
    bare: Annotated[Off | Cap, Field(discriminator="kind")] | None = None
    """Optional."""


class Bare(ConfigModel):
    """Forgets its docstrings."""

    good: int = 1
    """Described."""
    bad: int = 1
    inner: list[Leaf | int] = []


class Root(ConfigModel):
    """Root."""

    bare: Bare = Bare()
    """Bare."""


ROW_OF_EACH_KEY = {
    "leaf": "| `leaf` | `keys` | see its keys | The leaf. |",
    "leaves": "| `leaves` | `list of keys` | `[]` | Many leaves. |",
    "by_name": "| `by_name` | `mapping of keys \\| null` | `null` | Named leaves. |",
    "count": "| `count` | `int, >= 1, <= 9` | required | How many. |",
    "names": "| `names` | `list of text, length >= 1` | `[x]` | Names. |",
    "leaf.mode": "| `leaf.mode` | `a \\| b` | `'a'` | One of a\\|b. |",
    "leaf.bound": "| `leaf.bound` | `float \\| null, > 0` | `null` | Upper bound. |",
    "leaves.N.mode": "| `leaves.N.mode` | `a \\| b` | `'a'` | One of a\\|b. |",
    "by_name.N.mode": "| `by_name.N.mode` | `a \\| b` | `'a'` | One of a\\|b. |",
}


def test_every_key_has_its_row_and_every_model_its_section() -> None:
    lines = config_reference([("first", Node), ("second", Root)]).splitlines()
    for row in ROW_OF_EACH_KEY.values():
        assert row in lines
    for heading in (
        "## first",
        "### leaf",
        "### leaves.N",
        "### by_name.N",
        "## second",
        "### bare",
        "### bare.inner.N",
    ):
        assert lines.count(heading) == 1
    assert "A leaf with a long line." in lines


def test_a_choice_has_one_section_with_what_each_kind_is_and_its_keys() -> None:
    page = config_reference([("first", Chooser)])
    assert page.count("### guard\n") == page.count("### bare\n") == page.count("### guard.leaf\n") == 1
    lines = page.splitlines()
    for row in (
        "| `guard` | `keys` | `kind: off` | Which guard. |",
        "| `bare` | `keys \\| null` | `null` | Optional. |",
        "| `guard.kind` | meaning |",
        "| `clip` | Clips \\| cuts. |",
        "| `off` | Nothing. |",
        "| kind | key | type | default | meaning |",
        "| `cap` | `guard.high` | `float, >= 1` | `2.0` | Largest. |",
        "| `clip` | `guard.leaf` | `keys` | see its keys | Own leaf. |",
        "| `guard.leaf.mode` | `a \\| b` | `'a'` | One of a\\|b. |",
        "| `cap` | `bare.high` | `float, >= 1` | `2.0` | Largest. |",
    ):
        assert row in lines, row
    assert "`guard.kind` | `" not in page, "the kinds have their own table"


def test_a_model_that_contains_itself_ends() -> None:
    assert "### child" not in config_reference([("first", Node)])
    page = config_reference([("ring", Ring)])
    assert page.count("### link") == 1 and "### link.ring" not in page
    assert fields_without_description(Ring) == []


def test_the_page_is_the_same_each_time() -> None:
    assert config_reference([("first", Node)]) == config_reference([("first", Node)])


def test_fields_without_description_are_found_at_every_depth() -> None:
    assert fields_without_description(Root) == ["bare.bad", "bare.inner"]
    assert fields_without_description(Node) == []
