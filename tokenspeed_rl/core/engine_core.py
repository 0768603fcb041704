"""One engine's parts, put together: model, cache, scheduler, life cycle and the loop that owns them."""

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tokenspeed_rl.cache.kv_cache import KVCache, KVLayout
from tokenspeed_rl.cache.page_pool import PagePool
from tokenspeed_rl.cache.prefix_cache import PrefixCache
from tokenspeed_rl.config import EngineConfig
from tokenspeed_rl.core.capture import CallAgain, CudaCapture
from tokenspeed_rl.core.decode_graphs import DecodeGraphs
from tokenspeed_rl.core.engine_loop import EngineLoop
from tokenspeed_rl.core.intake import Intake
from tokenspeed_rl.core.kv_sizing import most_pages
from tokenspeed_rl.core.life_cycle import LifeCycle
from tokenspeed_rl.core.model_runner import ModelRunner
from tokenspeed_rl.core.model_source import ModelSource, open_model
from tokenspeed_rl.core.request import Request
from tokenspeed_rl.core.residents import GraphMemory, KVMemory, WeightsMemory
from tokenspeed_rl.core.scheduler import Scheduler
from tokenspeed_rl.core.watching.engine_log import EngineLog
from tokenspeed_rl.core.watching.expert_recorder import ExpertRecorder
from tokenspeed_rl.core.watching.record_file import write_record
from tokenspeed_rl.core.watching.watch import Watch
from tokenspeed_rl.core.weight_sync import WeightSync
from tokenspeed_rl.layers.triton_attention import TritonAttention
from tokenspeed_rl.lifecycle.expert_distribution import ExpertDistribution
from tokenspeed_rl.lifecycle.sessions import Sessions
from tokenspeed_rl.memory.region import TAGS
from tokenspeed_rl.weights import Receipt
from tokenspeed_rl_kernels.step_metadata import MOST_ROWS


class EngineCore:
    """Builds the parts and holds them; the loop's thread runs from construction to `shutdown`.

    Raises:
        ConfigError, WeightUpdateError, OutOfMemoryError: no engine can be built so; a live model is left as
            it was.
    """

    def __init__(self, model: Any, config: EngineConfig, tokenizer: Any) -> None:
        self.config = config
        self.log = EngineLog("tokenspeed_rl.engine", config.log_level)
        self.watch = Watch(
            config,
            self.log,
            tokenizer=lambda: self.source.tokenizer,
            steps=lambda: self.loop.stats.steps,
        )
        self.source = open_model(model, config, tokenizer)
        spec, store = self.source.spec, self.source.store
        self.context = config.max_model_len or spec.max_position
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
            reading=spec.head.reading,
            labels=spec.head.labels,
            pad_id=lambda: getattr(self.source.hf_config, "pad_token_id", None),
            has_experts=spec.experts is not None,
            adapters=lambda: store.adapters,
        )
        self.kv = _kv_cache(self.source, config, self.context)
        version = store.version
        graphs = _decode_graphs(self.source, self.kv, config, self.context, self.log)
        self.graph_memory = GraphMemory(graphs)
        runner = ModelRunner(self.source.decoder, self.kv, store.device, lambda: store.adapters, graphs)
        self.experts = _expert_distribution(self.source, config)
        self.loop = EngineLoop(
            self.scheduler,
            runner,
            self.source.tokenizer,
            version=lambda: version.label,
            control=lambda: self.life,
            log=self.log,
            observers=[ExpertRecorder(self.experts, runner), self.watch.profiler],
            on_end=self.watch.on_end,
            on_exit=self.watch.profiler.close,
            watchdog=self.watch.watchdog,
        )
        self.sessions = Sessions(
            self.loop.lock, abort=lambda rid: self.loop.abort([rid], "its session was closed")
        )
        self.weights_memory = WeightsMemory(self.source, backup=config.weights_backup == "cpu")
        self.kv_memory = KVMemory(
            self.kv, self.cache, self.source.memory, config, let_go=self.scheduler.retract_all
        )
        self.life = LifeCycle(
            self.scheduler,
            self.cache,
            version,
            {"weights": self.weights_memory, "kv_cache": self.kv_memory, "cuda_graph": self.graph_memory},
            end_all=lambda: self.loop.end_all("the engine was paused"),
            fit=self._fit_requests,
            check_shared=self.source.check_shared,
            take_submitted=self.loop.take_submitted,
            come_to_rest=store.settle,
            lock=self.loop.lock,
        )
        store.guard = self._read_weights
        self._closing = threading.Lock()
        self.sync = WeightSync(self.loop, self.life, self.source, self._closing, self.log)
        self.tunables = self.watch.begin(self.scheduler, version, self.loop)

    def capacity(self) -> int | None:
        """Most tokens of a request. The first call while its memory is not released maps it, as large as
        what is free then allows; None: not known yet.

        Raises:
            OutOfMemoryError: there is no room; a later call tries again.
        """
        if not self.kv_memory.mapped and "kv_cache" not in self.life.residency.released:
            self.loop.call(self._map_once).result()
        return self.kv_memory.capacity

    def change_weights(self, change: Callable[[], Receipt]) -> Receipt:
        """Run `change`, which writes nothing of the engine's own, between two steps. On the loop's thread.

        Raises:
            EngineStateError: a weight update is going on.
        """
        self.life.slot.refuse("a change of the weights")
        receipt = change()
        if not self.source.store.owned:
            self.weights_memory.forget()
        self.loop.end_where(self._lost_adapter)
        self.life.weights_committed(flush=True)
        self.log.info(
            "weights are version %r: %s, %d bytes copied", receipt.version, receipt.kind, receipt.bytes
        )
        return receipt

    def snapshot(self) -> dict[str, Any]:
        """The three axes of state, the queues, the cache and the totals, as of now. From any thread."""
        version, pool, life = self.source.store.version, self.cache.pool, self.life
        asleep = life.residency.released
        return {
            "admission": life.admission.mode or "running",
            "draining": life.admission.draining,
            "residency": {tag: "released" if tag in asleep else "resident" for tag in TAGS},
            "validity": "valid" if version.valid else f"invalid: {version.reason}",
            "updating": life.slot.taken,
            "weight_version": version.label,
            "weight_epoch": version.epoch,
            "weights_shared": self.source.shared is not None,
            "weight_bytes": self.source.store.nbytes,
            "adapters": {
                name: {"ranks": adapter.ranks, "bytes": adapter.nbytes}
                for name, adapter in self.source.store.adapters.items()
            },
            "kv_bytes": self.kv.nbytes,
            "num_running": len(self.scheduler.running),
            "num_waiting": self.scheduler.num_waiting,
            "num_retractions": self.scheduler.num_retractions,
            "num_preemptions": self.scheduler.num_preemptions,
            "num_live": self.loop.num_live,
            "pages": {
                "total": pool.num_pages,
                "free": pool.num_free,
                "cached": self.cache.num_cached,
                "idle": self.cache.num_idle,
            },
            "expert_distribution": self.experts.snapshot(),
            "memory": self.memory_report(),
            "sessions": self.sessions.snapshot(),
            **self.loop.stats.snapshot(),
            **self.watch.snapshot(),
        }

    def memory_report(self) -> dict[str, Any]:
        """Bytes per tag and who owns them, and the engine's that no tag releases. From any thread."""
        shared = self.source.shared is not None
        report: dict[str, Any] = {
            tag: {**usage._asdict(), "owner": "trainer" if tag == "weights" and shared else "engine"}
            for tag, usage in self.source.memory.usage().items()
        }
        report["cuda_graph"]["mapped"] += self.graph_memory.nbytes  # it is torch's, and no region
        return {**report, "untagged": self.source.decoder.nbytes}

    def shutdown(self) -> None:
        """End the loop and free what the engine owns; shared weights stay the module's. Idempotent."""
        if self.loop.elsewhere:  # all of it is the parent's
            return
        self.loop.shutdown()
        self.watch.close()
        self.sync.groups.close_all()
        with self._closing:  # an update writes no more from here on
            self.kv.close()
            self.source.store.close()
            self.weights_memory.forget()

    def _read_weights(self, read: Callable[[], str | None]) -> str | None:
        def checked() -> str | None:
            self.life.require_readable()
            return read()

        return self.loop.call(checked).result()

    def _map_once(self) -> None:
        if not self.kv_memory.mapped and "kv_cache" not in self.life.residency.released:
            self.kv_memory.map()
            self._fit_requests(None)
            self.log.info("the KV cache has %d pages, %d bytes", self.kv.num_pages, self.kv.nbytes)

    def _lost_adapter(self, request: Request) -> str | None:
        if request.lora is None or request.lora in self.source.store.adapters:
            return None
        return f"the shared module has no adapter {request.lora!r} any more"

    def _fit_requests(self, requests: Sequence[Request] | None) -> None:
        self.loop.end_where(self._lost_adapter, requests)  # it may have gone since they were checked
        if self.kv_memory.mapped and self.kv_memory.capacity is not None:
            self.loop.fit(self.kv_memory.capacity, requests)


def _expert_distribution(source: ModelSource, config: EngineConfig) -> ExpertDistribution:
    spec, folder = source.spec.experts, config.expert_distribution_dir
    if spec is None:
        return ExpertDistribution((), 0, 0)
    write = None if folder is None else partial(write_record, folder, "expert_distribution")
    return ExpertDistribution(spec.layers, spec.count, spec.per_token, write)


def _decode_graphs(
    source: ModelSource, kv: KVCache, config: EngineConfig, context: int, log: logging.Logger
) -> DecodeGraphs | None:
    """What replays decode steps, where the device and the model allow it."""
    spec, store = source.spec, source.store
    triton = isinstance(source.decoder.backend, TritonAttention)
    if not (config.enable_cuda_graph and triton and spec.head.generates and spec.experts is None):
        return None
    return DecodeGraphs(
        source.decoder,
        kv,
        CudaCapture(store.device) if store.device.type == "cuda" else CallAgain(),
        device=store.device,
        max_rows=min(config.max_running_requests, MOST_ROWS),
        context=context,
        bindings=lambda: store.bindings,
        log=log,
    )


def _kv_cache(source: ModelSource, config: EngineConfig, context: int) -> KVCache:
    spec = source.spec
    layout = KVLayout(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        page_size=config.page_size,
        head_dim=spec.head_dim,
        dtype=source.store.dtype,
    )
    most = most_pages(config, bytes_per_page=layout.page_bytes, context=context, total=source.memory.total())
    return KVCache(layout, most, lambda nbytes, stripes: source.memory.reserve("kv_cache", nbytes, stripes))
