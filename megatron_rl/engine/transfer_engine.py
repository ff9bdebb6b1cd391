"""The arena as a vLLM weight-transfer engine. Lives in the worker that holds the model."""

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger
from vllm.model_executor.model_loader import DefaultModelLoader, get_model_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from megatron_rl.engine import vllm_on_cpu
from megatron_rl.records import TensorSlot, WeightManifest
from megatron_rl.weight_sync.errors import WeightsLostError
from megatron_rl.weight_sync.nixl import NixlArena
from megatron_rl.weight_sync.plan import arena_nbytes
from megatron_rl.weight_sync.receiver import WeightReceiver, check_slots, checkpoint_shapes

logger = init_logger(__name__)
# It warns, at every update, of layers without weights of their own; that all tensors are there is checked before.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


@dataclass
class ArenaInitInfo(WeightTransferInitInfo):
    """What the trainer will send, and over which wire."""

    slots: list[dict[str, Any]]
    """TensorSlot as plain data."""
    ucx_tls: str


@dataclass
class ArenaUpdateInfo(WeightTransferUpdateInfo):
    """WeightManifest, field by field."""

    version: int
    buffer_index: int
    checksums: dict[str, str] = field(default_factory=dict)


class ArenaTransferEngine(WeightTransferEngine[ArenaInitInfo, ArenaUpdateInfo]):
    """One update is one call of receive_weights: nothing has changed when it raises."""

    init_info_cls = ArenaInitInfo
    update_info_cls = ArenaUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._receiver: WeightReceiver | None = None
        self._retired: list[WeightReceiver] = []
        """A trainer that gave up may still be writing into them: their memory is never freed."""

    def init_transfer_engine(self, init_info: ArenaInitInfo) -> None:
        """Opens a fresh arena; one that was open before is written to no more."""
        slots = msgspec.convert(init_info.slots, list[TensorSlot])
        tied = bool(getattr(self.model_config.hf_config, "tie_word_embeddings", False))
        check_slots(slots, checkpoint_shapes(Path(self.model_config.model)), tied=tied)
        arena = NixlArena(arena_nbytes(slots), ucx_tls=init_info.ucx_tls)
        if self._receiver is not None:
            self._retired.append(self._receiver)
        self._receiver = WeightReceiver(slots, arena, previous=self._receiver)
        logger.info(
            "weight arena open: %d tensors, 2 x %d bytes, UCX_TLS=%s",
            len(slots),
            arena_nbytes(slots),
            init_info.ucx_tls,
        )

    def address(self) -> dict[str, Any]:
        """ArenaAddress as plain data."""
        return msgspec.to_builtins(self._open_receiver().arena.address)

    def start_weight_update(self) -> None:
        """Touches nothing: the model is changed only after the version has been verified."""
        self._open_receiver()

    def receive_weights(self, update_info: ArenaUpdateInfo) -> None:
        """Verifies and loads one version. An error says what the engine serves now; weights lost end the process."""
        manifest = WeightManifest(update_info.version, update_info.buffer_index, update_info.checksums)
        try:
            self._open_receiver().commit(manifest, load=self._load, reload_initial=self._load_checkpoint)
        except WeightsLostError:
            logger.exception("this engine has no usable weights any more and ends")
            os._exit(1)

    def finish_weight_update(self) -> None:
        """Nothing is left to do."""

    def shutdown(self) -> None:
        """Ends the registrations."""
        for receiver in [*self._retired, *([self._receiver] if self._receiver else [])]:
            receiver.arena.close()
        self._retired, self._receiver = [], None

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """HF tensors into the running model's own storage, layer by layer."""
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(weights)  # pyright: ignore[reportCallIssue]
        finally:
            finalize_layerwise_reload(self.model, self.model_config)
            if current_platform.is_cpu():
                vllm_on_cpu.repack_tied_head(self.model)

    def _load_checkpoint(self) -> None:
        loader = get_model_loader(self.vllm_config.load_config)
        assert isinstance(loader, DefaultModelLoader), f"engines start from safetensors, got {type(loader).__name__}"
        self._load(loader.get_all_weights(self.model_config, self.model))

    def _open_receiver(self) -> WeightReceiver:
        if self._receiver is None:
            raise RuntimeError("no weight arena is open; the trainer opens one with /init_weight_transfer_engine")
        return self._receiver
