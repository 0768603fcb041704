"""One engine's parts, put together: model, cache, scheduler and the loop that owns them."""

import logging
import threading
from collections.abc import Callable
from typing import Any

from tokenspeed_rl.cache.kv_cache import KVCache
from tokenspeed_rl.cache.page_pool import PagePool
from tokenspeed_rl.cache.prefix_cache import PrefixCache
from tokenspeed_rl.config import EngineConfig
from tokenspeed_rl.core.engine_loop import EngineLoop
from tokenspeed_rl.core.intake import Intake
from tokenspeed_rl.core.kv_sizing import free_bytes, kv_size
from tokenspeed_rl.core.model_runner import ModelRunner
from tokenspeed_rl.core.model_source import open_model
from tokenspeed_rl.core.scheduler import Scheduler
from tokenspeed_rl.errors import OutOfMemoryError
from tokenspeed_rl.weights import Receipt


class EngineCore:
    """Builds the parts and holds them; the loop's thread runs from construction to `shutdown`.

    Raises:
        ConfigError, WeightUpdateError: no engine can be built so; a live model is left as it was.
    """

    def __init__(self, model: Any, config: EngineConfig, tokenizer: Any) -> None:
        self.config = config
        # Not one of logging's registry, which would keep it for ever; handlers are those of "tokenspeed_rl".
        self.log = logging.Logger("tokenspeed_rl.engine", config.log_level.upper())
        self.log.parent = logging.getLogger("tokenspeed_rl")
        self.source = open_model(model, config, tokenizer)
        spec, store = self.source.spec, self.source.store
        self.context = config.max_model_len or spec.max_position
        self.kv = KVCache(
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            page_size=config.page_size,
            head_dim=spec.head_dim,
            dtype=store.dtype,
            device=store.device,
        )
        self.cache = PrefixCache(PagePool(), config.page_size, enabled=config.enable_prefix_caching)
        self.scheduler = Scheduler(
            self.cache, max_running=config.max_running_requests, prefill_budget=config.chunked_prefill_size
        )
        self.intake = Intake.create(
            vocab_size=spec.vocab_size,
            context=self.context,
            eos_ids=[i for i in self.source.eos_ids if i < spec.vocab_size],
            tokenizer=self.source.tokenizer,
            seed=config.seed,
        )
        version = store.version
        self.loop = EngineLoop(
            self.scheduler,
            ModelRunner(self.source.decoder, self.kv, store.device),
            self.source.tokenizer,
            version=lambda: version.label,
            gate=lambda: version.valid,
            log=self.log,
        )
        self._mapping = threading.Lock()
        self._capacity: int | None = None

    def capacity(self) -> int:
        """Tokens the KV cache holds. The first call sizes and maps it, from the memory free then.

        Raises:
            OutOfMemoryError: there is no room; a later call tries again.
        """
        with self._mapping:
            if self._capacity is None:
                size = kv_size(
                    self.config,
                    bytes_per_page=self.kv.bytes_per_page,
                    context=self.context,
                    device=self.source.store.device,
                )
                self.loop.call(lambda: self._map(size.pages)).result()
                self._capacity = size.tokens
            return self._capacity

    def change_weights(self, change: Callable[[], Receipt]) -> Receipt:
        """Run `change` between two steps; on success requests in flight re-prefill and no older KV is ever
        read.

        On the loop's thread.
        """
        receipt = change()
        self.scheduler.retract_all()
        self.cache.flush()
        self.log.info(
            "weights are version %r: %s, %d bytes copied", receipt.version, receipt.kind, receipt.bytes
        )
        return receipt

    def snapshot(self) -> dict[str, Any]:
        """The three axes of state, the queues, the cache and the totals, as of now. From any thread."""
        version, pool = self.source.store.version, self.cache.pool
        return {
            "admission": "running",
            "residency": {"weights": "resident", "kv_cache": "resident", "cuda_graph": "resident"},
            "validity": "valid" if version.valid else f"invalid: {version.reason}",
            "weight_version": version.label,
            "weight_epoch": version.epoch,
            "weights_shared": self.source.shared is not None,
            "weight_bytes": self.source.store.nbytes,
            "kv_bytes": self.kv.nbytes,
            "num_running": len(self.scheduler.running),
            "num_waiting": self.scheduler.num_waiting,
            "num_retractions": self.scheduler.num_retractions,
            "pages": {
                "total": pool.num_pages,
                "free": pool.num_free,
                "cached": self.cache.num_cached,
                "idle": self.cache.num_idle,
            },
            **self.loop.stats.snapshot(),
        }

    def shutdown(self) -> None:
        """End the loop and free what the engine owns; shared weights stay the module's. Idempotent."""
        self.loop.shutdown()
        self.kv.unmap()
        self.source.store.weights.clear()

    def _map(self, pages: int) -> None:
        try:
            self.kv.map(pages)
        except RuntimeError as error:  # what torch raises where an allocator gives nothing
            raise OutOfMemoryError(
                "the KV cache can't be allocated",
                wanted=pages * self.kv.bytes_per_page,
                free=free_bytes(self.source.store.device),
                fix="Lower max_total_tokens or mem_fraction.",
            ) from error
        self.cache.pool.resize(pages)
        self.log.info("the KV cache has %d pages, %d bytes", pages, self.kv.nbytes)
