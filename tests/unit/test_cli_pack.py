"""megatron-rl pack: its numbers are those of the packers and the simulation, and what does not fit is named."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import typer

from megatron_rl.cli.main import app
from megatron_rl.data.balance import packed_costs, share_of_ideal, sorted_draws
from megatron_rl.data.cost import CostModel
from megatron_rl.data.pack_forecast import PackSettings, forecast
from megatron_rl.data.packers import PACKERS, padding

ErrorOf = Callable[..., str]
CAPACITY = 1000
SMALL = ["--dry-run", "--capacity", str(CAPACITY), "--ranks", "4", "--open-bins", "8", "--buffer", "32"]


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    """File of 3,000 heavy-tailed lengths of 2 to CAPACITY + 1 tokens."""
    drawn = np.random.default_rng(0).lognormal(3.5, 1.5, 3000).astype(int).clip(2, CAPACITY + 1)
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, drawn)) + "\n\n")
    return path


@pytest.fixture
def output_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*arguments: str | Path) -> str:
        app([str(argument) for argument in arguments], standalone_mode=False)
        return capsys.readouterr().out

    return run


def cells(output: str, start: str) -> list[str]:
    """Cells of the table row that starts so."""
    (line,) = [line for line in output.splitlines() if line.strip().startswith(start)]
    return re.split(r"\s{2,}", line.strip())


def test_the_tables_show_padding_costs_and_speed_up(output_of: Callable[..., str], lengths: Path) -> None:
    output = output_of("pack", "--lengths", lengths, *SMALL)
    positions = np.loadtxt(lengths, dtype=np.int64) - 1
    assert output.startswith(f"3,000 documents, {positions.sum():,} tokens, the longest {positions.max():,}")
    for name, packer, k in (
        ("Next-k-Fit, k = 1 ", "next_k_fit", 1),
        ("Next-k-Fit, k = 8 ", "next_k_fit", 8),
        ("first-fit ", "first_fit", 8),
        ("best-fit-decreasing", "best_fit_decreasing", 8),
    ):
        numbers = PACKERS[packer](positions, CAPACITY, open_bins=k)
        expected = [f"{numbers.max() + 1:,}", f"{padding(numbers, positions, CAPACITY):.3%}"]
        assert cells(output, name)[1:3] == expected
    result = forecast(positions, PackSettings(CAPACITY, open_bins=8, buffer=32, num_ranks=4, cost=CostModel()))
    for order in ("in the order packed", "cost-sorted, buffer 32"):
        shown = [f"{result.throughput[order]:.1%}", f"{result.speed_up(order):.2f}x"]
        assert cells(output, order)[1:3] == shown


def test_the_forecast_is_what_ranks_that_pack_their_own_shares_would_have() -> None:
    positions = np.random.default_rng(0).lognormal(3.5, 1.5, 3000).astype(int).clip(1, CAPACITY)
    result = forecast(positions, PackSettings(CAPACITY, open_bins=8, buffer=32, num_ranks=16, cost=CostModel()))
    costs = packed_costs(positions, capacity=CAPACITY, open_bins=8, num_ranks=16, num_draws=512, cost=CostModel())
    for order, drawn in (("in the order packed", costs), ("cost-sorted, buffer 32", sorted_draws(costs, 32))):
        assert result.throughput[order] == pytest.approx(share_of_ideal(drawn), rel=0.05)
    assert result.speed_up("cost-sorted, buffer 32") > 1.5


def test_the_costs_are_those_of_one_pass_over_their_mean() -> None:
    positions = np.array([8, 4, 4, 2, 2, 2, 2])
    result = forecast(positions, PackSettings(8, open_bins=2, buffer=2, num_ranks=2, cost=CostModel()))
    assert result.costs.tolist() == pytest.approx(np.array([16, 32, 64]) / (112 / 3))
    assert result.padding["Next-k-Fit, k = 2"] == (3, 0.0) and result.num_draws >= 4


def test_lengths_are_the_same_from_a_list_a_column_and_the_tokenizer(
    output_of: Callable[..., str], tiny: Path, tmp_path: Path
) -> None:
    from megatron_rl.data.conversation import conversation_of
    from megatron_rl.data.mask import MaskConfig
    from megatron_rl.data.render import ChatRenderer, load_tokenizer

    renderer = ChatRenderer(load_tokenizer(tiny / "model"))
    rows = [json.loads(line) for line in (tiny / "train.jsonl").read_text().splitlines()]
    counted = [
        {**row, "num_tokens": len(renderer.render(conversation_of("row", row), MaskConfig()).token_ids)} for row in rows
    ]
    data, numbers = tmp_path / "counted.jsonl", tmp_path / "lengths.txt"
    data.write_text("".join(json.dumps(row) + "\n" for row in counted))
    numbers.write_text("".join(f"{row['num_tokens']}\n" for row in counted))
    outputs = {
        output_of("pack", *source, *SMALL, "--cost", "attention")
        for source in (
            ("--lengths", numbers),
            (data, "--lengths-column", "num_tokens"),
            (tiny / "train.jsonl", "--model", tiny / "model"),
            (data, "--model", tiny / "model"),
        )
    }
    assert len(outputs) == 1 and f"{len(rows)} documents" in outputs.pop()


def test_with_a_model_the_cost_is_that_of_its_layers(output_of: Callable[..., str], tiny: Path, lengths: Path) -> None:
    with_model = output_of("pack", "--lengths", lengths, "--model", tiny / "model", *SMALL)
    attention = output_of("pack", "--lengths", lengths, *SMALL)
    hf_config = json.loads((tiny / "model" / "config.json").read_text())
    even = CostModel.from_hf_config(hf_config).even_length()
    assert f"attention costs more than the rest from {even:,} tokens on" in with_model
    shares = [float(cells(output, "in the order packed")[1].rstrip("%")) for output in (with_model, attention)]
    assert shares[0] > shares[1]


def test_the_plot_is_an_svg_with_every_order(output_of: Callable[..., str], lengths: Path, tmp_path: Path) -> None:
    plot = tmp_path / "plots" / "pack.svg"
    assert f"plot: {plot}" in output_of("pack", "--lengths", lengths, *SMALL, "--plot", plot)
    texts = [element.text or "" for element in ElementTree.parse(plot).iter() if element.tag.endswith("text")]
    assert "in the order packed" in texts and "cost-sorted, buffer 32" in texts
    assert any(text.startswith("3,000 documents") for text in texts)


def test_oversized_documents_are_counted(output_of: Callable[..., str], tmp_path: Path) -> None:
    numbers = tmp_path / "lengths.txt"
    numbers.write_text(f"{CAPACITY + 1}\n{CAPACITY + 2}\n500\n")
    cut = output_of("pack", "--lengths", numbers, *SMALL, "--oversized", "truncate")
    dropped = output_of("pack", "--lengths", numbers, *SMALL, "--oversized", "drop")
    assert "3 documents, 2,499 tokens" in cut and "1 documents that are longer than a sequence were cut" in cut
    assert "2 documents, 1,499 tokens" in dropped and "were left out" in dropped


def test_what_cannot_be_packed_is_named(error_of: ErrorOf, tiny: Path, tmp_path: Path) -> None:
    def listed(text: str) -> tuple[str, ...]:
        path = tmp_path / str(len(list(tmp_path.iterdir()))) / "lengths.txt"
        path.parent.mkdir()
        path.write_text(text)
        return "pack", "--lengths", str(path), *SMALL

    train = str(tiny / "train.jsonl")
    for arguments, message in (
        (("pack", train), "pack writes nothing, as the trainer packs while it reads; add --dry-run"),
        (("pack", "--dry-run"), "pack needs either DATA or --lengths, got neither"),
        (("pack", train, "--lengths", "x", "--dry-run"), "pack needs either DATA or --lengths, got both"),
        (("pack", train, "--dry-run"), "give --model, whose tokenizer and chat template count"),
        (("pack", "--lengths", "x", "--lengths-column", "n", "--dry-run"), "--lengths-column has no effect without"),
        (listed("7\nseven\n"), "lengths.txt:2: a line must be a number of tokens, got 'seven'"),
        (listed("7\n\n1\n"), "lengths.txt:3: a document must have at least 2 tokens, got 1"),
        (listed("7\n1002\n"), "lengths.txt:2: a document must fill at most the 1000 positions of --capacity, got 1001"),
        (listed("\n"), "there must be at least one document to pack, got none"),
        ((*listed("2000\n"), "--oversized", "drop"), "got none, all 1 were dropped"),
        (("pack", "--lengths", str(tmp_path / "no.txt"), "--dry-run"), "no.txt must be readable, got No such file"),
        ((*listed("7\n"), "--cost", "model"), "--cost model needs the model's config.json"),
        ((*listed("7\n"), "--cost", "attention", "--model", "m"), "--model has no effect when lengths are given"),
        ((*listed("7\n"), "--plot", "plot.png"), "--plot must be an .svg file, got plot.png"),
        (("pack", train, "--lengths-column", "n", *SMALL), "train.jsonl:1: a row must have the column n, got"),
        (("pack", train, "--lengths-column", "messages", *SMALL), "messages must be a number of tokens, got"),
    ):
        assert message in error_of(*arguments), arguments


@pytest.mark.parametrize("option", ["--open-bins", "--buffer", "--capacity", "--ranks"])
def test_sizes_below_one_are_refused(option: str) -> None:
    with pytest.raises(typer.BadParameter, match="Input should be greater than or equal to 1"):
        app(["pack", "--dry-run", "--lengths", "x", option, "0"], standalone_mode=False)
