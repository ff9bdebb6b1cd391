"""Loading: what a file and overrides say is what comes out, and every mistake is named with its cure."""

import math
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, field_validator

from megatron_rl.config import ConfigError, ConfigModel
from megatron_rl.config.load import dump_config, load_config, read_tree


class Optimizer(ConfigModel):
    """Optimizer."""

    lr: float = Field(gt=0, default=1e-5)
    """Learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decays."""

    @field_validator("lr")
    @classmethod
    def _small(cls, value: float) -> float:
        if value > 1:
            raise ValueError(f"lr must be at most 1, got {value}; 1e-5 is usual")
        return value


class Loss(ConfigModel):
    """Loss."""

    eps_low: float = 0.2
    """Lower."""
    eps_high: float = 0.2
    """Upper."""
    g_max: float | None = 2.0
    """Bound."""
    sided: Literal["sign", "symmetric"] = "sign"
    """Kind."""
    chunk: int | Literal["auto"] = "auto"
    """Chunk."""


class Clip(ConfigModel):
    """One of a choice."""

    kind: Literal["clip"] = "clip"
    """Tag."""
    eps_high: float = 0.2
    """Upper."""
    width: float = 1.0
    """Width."""


class Cap(ConfigModel):
    """Another of a choice."""

    kind: Literal["cap"] = "cap"
    """Tag."""
    high: float = Field(ge=1, default=2.0)
    """Cap."""


class Source(ConfigModel):
    """Environment."""

    name: str
    """Which one."""
    options: dict[str, Any] = {}
    """Its options."""
    loss: Loss | None = None
    """Own loss."""


class Run(ConfigModel):
    """Root."""

    dir: str
    """Folder of the run."""
    steps: int = Field(ge=1, default=3)
    """Steps."""
    optimizer: Optimizer = Optimizer()
    """Optimizer."""
    loss: Loss = Loss()
    """Loss."""
    environments: list[Source] = Field(min_length=1)
    """Environments."""
    named: dict[str, Source] = {}
    """By name."""
    choice: Annotated[Clip | Cap, Field(discriminator="kind")] = Clip()
    """A choice."""
    choices: list[Annotated[Clip | Cap, Field(discriminator="kind")]] = []
    """Many."""


GOOD = "dir: runs/a\nenvironments:\n  - name: baker\n  - name: gcd\n"


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A valid file."""
    return write(tmp_path, GOOD)


def write(folder: Path, text: str) -> Path:
    """text as a run file."""
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def error_of(path: Path, *overrides: str) -> str:
    """Message of the ConfigError that loading raises, without the file's name in front."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, Run, overrides)
    return str(caught.value).removeprefix(f"{path}: ")


def test_a_file_gives_its_values_and_the_defaults(good: Path) -> None:
    config = load_config(good, Run)
    assert config == Run(dir="runs/a", environments=[Source(name="baker"), Source(name="gcd")])


def test_overrides_are_yaml_and_reach_into_mappings_and_lists(good: Path) -> None:
    config = load_config(
        str(good),
        Run,
        [
            "steps=7",
            "optimizer.lr=2e-4",
            "loss.g_max=null",
            "loss.chunk=64",
            "environments.1.name=a=b.c",
            "environments.0.options={terms: 2, ops: [+, 1e-3]}",
            "named.x.name=gcd",
            "dir=/tmp/with space",
        ],
    )
    assert (config.steps, config.optimizer.lr, config.loss.g_max, config.loss.chunk) == (7, 2e-4, None, 64)
    assert [source.name for source in config.environments] == ["baker", "a=b.c"]
    assert config.environments[0].options == {"terms": 2, "ops": ["+", 1e-3]}
    assert config.named["x"].name == "gcd" and config.dir == "/tmp/with space"


def test_a_choice_is_told_apart_by_its_kind(good: Path) -> None:
    config = load_config(good, Run, ["choice.kind=cap", "choice.high=3", "choices=[{kind: clip, eps_high: 1}]"])
    assert config.choice == Cap(high=3.0) and config.choices == [Clip(eps_high=1.0)]
    path = write(good.parent, dump_config(config))
    assert load_config(path, Run) == config


def test_the_last_override_of_a_key_wins(good: Path) -> None:
    assert load_config(good, Run, ["steps=4", "steps=5"]).steps == 5


def test_read_tree_is_unchecked(good: Path) -> None:
    assert read_tree(good, ["bogus.key=1"])["bogus"] == {"key": 1}


def test_interpolation_is_not_done(good: Path) -> None:
    assert load_config(good, Run, ["dir=${HOME}/$x"]).dir == "${HOME}/$x"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("loss.eps_hihg=0.3", "unknown key loss.eps_hihg; did you mean eps_high?"),
        ("environments.1.nmae=x", "unknown key environments.1.nmae; did you mean name?"),
        ("environments.0.loss.eps_hig=1", "unknown key environments.0.loss.eps_hig; did you mean eps_high?"),
        ("named.a={name: x, optoins: {}}", "unknown key named.a.optoins; did you mean options?"),
        ("lr=1", "unknown key lr; did you mean optimizer.lr?"),
        ("optimizer.zzz=1", "unknown key optimizer.zzz; known here: lr, betas"),
        ("steps=0", "steps must be greater than or equal to 1, got 0; the default is 3"),
        ("steps=many", "steps must be an integer, got 'many'; the default is 3"),
        ("dir=null", "dir must be a string, got null; Folder of the run."),
        ("loss.sided=symetric", "loss.sided must be 'sign' or 'symmetric', got 'symetric'; did you mean symmetric?"),
        ("loss.chunk=aut", "loss.chunk must be an integer or 'auto', got 'aut'; did you mean auto?"),
        ("loss=3", "loss must be a mapping of keys, got 3; leave it out for the default"),
        ("environments.0.options=[1]", "environments.0.options must be a dictionary, got [1]; the default is {}"),
        ("optimizer.lr=3", "optimizer.lr: lr must be at most 1, got 3.0; 1e-5 is usual"),
        ("environments.0={}", "environments.0.name is required and missing; add it: Which one."),
        ("choice={kind: clip, eps_hihg: 1}", "unknown key choice.eps_hihg; did you mean eps_high?"),
        ("choice={kind: cap, eps_zzz: 1}", "unknown key choice.eps_zzz; known here: kind=cap, high"),
        ("choice={kind: cap, width: 1}", "unknown key choice.width; known here: kind=cap, high"),
        ("width=1", "unknown key width; did you mean choice.width?"),
        ("choice={kind: cap, high: 0}", "choice.high must be greater than or equal to 1, got 0; the default is 2.0"),
        ("choice.kind=clib", "choice.kind must be 'clip' or 'cap', got 'clib'; did you mean clip?"),
        ("choice.kind=x", "choice.kind must be 'clip' or 'cap', got 'x'; the default is clip"),
        ("choice={eps_high: 1}", "choice.kind is required and missing; it must be 'clip' or 'cap'"),
        ("choice=clip", "choice must be a mapping of keys, got 'clip'; leave it out for the default"),
        ("choices=[{kind: cap, hihg: 3}]", "unknown key choices.0.hihg; did you mean high?"),
        ("choices=[{kind: kap}]", "choices.0.kind must be 'clip' or 'cap', got 'kap'; did you mean cap?"),
        ("high=3", "unknown key high; did you mean choice.high?"),
        ("optimizer.betas.0=1", "optimizer.betas must be a tuple, got {'0': 1}; the default is [0.9, 0.95]"),
    ],
)
def test_a_value_that_does_not_fit_is_named_with_rule_and_cure(good: Path, override: str, message: str) -> None:
    assert error_of(good, override) == message


def test_all_problems_are_listed_at_once(good: Path) -> None:
    message = error_of(good, "loss.eps_hihg=0.3", "steps=0", "environments.1.nmae=x")
    lines = message.splitlines()
    assert lines[0] == "3 problems"
    assert {line.split(";")[0] for line in lines[1:]} == {
        "  unknown key loss.eps_hihg",
        "  unknown key environments.1.nmae",
        "  steps must be greater than or equal to 1, got 0",
    }


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "an override reads key.sub=value, got 'steps'; write it like trainer.steps=10"),
        ("=3", "an override reads key.sub=value, got '=3'"),
        ("loss..g_max=3", "an override reads key.sub=value, got 'loss..g_max=3'"),
        ("loss.g_max =3", "an override reads key.sub=value, got 'loss.g_max =3'"),
        ("steps=[1", "override 'steps=[1':1: not valid YAML"),
        ("dir.x=1", "override 'dir.x=1' goes below dir, which holds 'runs/a'; set dir itself"),
        ("environments.2.name=x", "needs an index of environments, which has 2 items, got '2'"),
        ("environments.first.name=x", "needs an index of environments, which has 2 items, got 'first'"),
        ("environments.-1=x", "needs an index of environments, which has 2 items, got '-1'"),
    ],
)
def test_a_malformed_override_is_refused(good: Path, override: str, message: str) -> None:
    assert message in error_of(good, override)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dir: a\nloss: [1, 2\nsteps: 3\n", ":3: not valid YAML"),
        ("dir: a\n\tsteps: 3\n", ":2: not valid YAML"),
        ("dir: a\nloss:\n  g_max: 1\n  g_max: 2\n", ":4: not valid YAML: a key may occur once, got g_max again"),
        ("dir: !!python/object:os.system x\n", ":1: not valid YAML: could not determine a constructor"),
        ("- dir\n", "must hold a mapping, got [dir]; write lines `key: value`"),
        ("", "must hold a mapping, got null"),
        ("dir: '\x00'\n", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_yaml_mapping_is_refused_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, Run)
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    assert (
        error_of(tmp_path / "no.yaml")
        == f"config file {tmp_path / 'no.yaml'} does not exist; give the path of a YAML file"
    )
    assert f"config file {tmp_path} cannot be read" in error_of(tmp_path)


def test_bytes_that_are_not_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_bytes(b"dir: \xff\xfe")
    assert "b.yaml cannot be read: not UTF-8 text" in error_of(tmp_path / "b.yaml")


TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12) | st.sampled_from(
    ["1e-5", "2E+3", "null", "yes", "1", "1.5", "~", ".inf", "a: b", "# c", "- x", "${x}", "line\nbreak", "\t", "0x1F"]
)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(name=TEXTS, options=st.dictionaries(TEXTS, TREES, max_size=3), g_max=FLOATS | st.none())
def test_a_dumped_config_loads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, name: str, options: dict[str, Any], g_max: float | None
) -> None:
    config = Run(dir=name, environments=[Source(name=name, options=options)], loss=Loss(g_max=g_max))
    path = write(tmp_path_factory.mktemp("dump"), dump_config(config))
    assert load_config(path, Run) == config


def test_paths_enums_and_shared_values_are_dumped_plainly(tmp_path: Path) -> None:
    class Colour(Enum):
        RED = "red"

    class Odd(ConfigModel):
        folder: Path
        colour: Colour
        first: list[int]
        second: list[int]

    shared = [1, 2]
    config = Odd(folder=Path("a/b"), colour=Colour.RED, first=shared, second=shared)
    text = dump_config(config)
    assert text == "folder: a/b\ncolour: red\nfirst:\n- 1\n- 2\nsecond:\n- 1\n- 2\n"
    assert load_config(write(tmp_path, text), Odd) == config


def test_a_dump_shows_every_default_in_the_order_of_the_model(good: Path) -> None:
    text = dump_config(load_config(good, Run))
    assert text.startswith("dir: runs/a\nsteps: 3\noptimizer:\n  lr: 1.0e-05\n")
    assert "sided: sign" in text


@given(value=st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_override_is_read_exactly_as_python_writes_it(
    tmp_path_factory: pytest.TempPathFactory, value: float
) -> None:
    path = write(tmp_path_factory.mktemp("float"), GOOD)
    got = load_config(path, Run, [f"environments.0.options.x={value!r}"]).environments[0].options["x"]
    assert isinstance(got, float) and got == value and math.copysign(1, got) == math.copysign(1, value)
