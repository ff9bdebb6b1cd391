"""The vLLM servers of a run."""

from typing import Literal

from pydantic import Field

from megatron_rl.config import ConfigModel


class EngineConfig(ConfigModel):
    """How engines are started and asked. All engines of a run are alike."""

    count: int = Field(ge=1, default=1)
    """Engines to start on this machine."""
    urls: list[str] = []
    """Addresses of engines on any machines, such as http://10.0.0.7:8000, each started by `megatron-rl engine CONFIG
    --index N`, which reads the other options here; empty: start count of them here."""
    host: str = "127.0.0.1"
    """Address to listen on. The server can load weights and run code: anything but loopback needs allow_remote."""
    port: int = Field(ge=0, le=65535, default=0)
    """Port of the first engine, the next ones follow; 0 takes free ports."""
    allow_remote: bool = False
    """Allows a host that is not loopback. Only inside a network where you trust every machine."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of weights and activations; auto takes the checkpoint's. Logits are float32 in any case."""
    max_model_len: int | None = Field(ge=2, default=None)
    """Longest prompt plus completion in tokens; null takes the model's."""
    max_num_seqs: int = Field(ge=1, default=128)
    """Sequences decoded at the same time."""
    kv_cache_gib: float = Field(gt=0, default=1.0)
    """Memory for keys and values on the CPU; a GPU uses gpu_memory_share."""
    gpu_memory_share: float = Field(gt=0, le=1, default=0.9)
    """Share of a GPU's memory that vLLM may use."""
    prefix_caching: bool = True
    """Keeps the keys and values of prompts for the next request with the same start; emptied by every weight update."""
    tensor_parallel: int = Field(ge=1, default=1)
    """GPUs of one engine. Only 1 so far: weights are received by one worker."""
    cpu_threads: int = Field(ge=1, default=1)
    """Threads of one engine on the CPU; more than there are idle cores makes it many times slower."""
    start_timeout_s: float = Field(gt=0, default=300.0)
    """Longest an engine may take to start."""
    request_timeout_s: float = Field(gt=0, default=600.0)
    """Longest a request may take, retries and pauses for weight updates included."""
    vllm_args: list[str] = []
    """Further arguments of vLLM's server, as on its command line."""
