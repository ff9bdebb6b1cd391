"""docs/configuration.md is what the models say; every option has a description."""

from pathlib import Path

from megatron_rl.cli.docs import ROOTS, reference
from megatron_rl.config.reference import fields_without_description

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_configuration_page_is_generated_from_the_models() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), "run `make docs`"


def test_every_option_has_a_description() -> None:
    assert [key for _, model in ROOTS for key in fields_without_description(model)] == []
