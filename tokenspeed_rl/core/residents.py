"""The memory of each tag, as `Residency` releases and takes it."""

from __future__ import annotations

from collections.abc import Callable

from tokenspeed_rl.cache.kv_cache import KVCache
from tokenspeed_rl.cache.prefix_cache import PrefixCache
from tokenspeed_rl.config import EngineConfig
from tokenspeed_rl.core.decode_graphs import DecodeGraphs
from tokenspeed_rl.core.kv_sizing import kv_size
from tokenspeed_rl.core.model_source import ModelSource
from tokenspeed_rl.memory.region import Backup, Memory


class WeightsMemory:
    """The engine's own weights; those of a trainer's module stay where they are."""

    def __init__(self, source: ModelSource, *, backup: bool) -> None:
        self._source = source
        self._keep = backup
        self._backup: Backup | None = None

    def release(self) -> None:
        """Save them if they are valid and a backup is asked for, else they are invalid from now on."""
        store = self._source.store
        if store.region is None:
            return
        keep = self._keep and store.version.valid
        backup = self._source.memory.save(store.region) if keep else None
        try:
            store.region.unmap()
        except BaseException:
            if backup is not None:
                backup.close()
            raise
        self._backup = backup
        if backup is None:
            why = "as no complete set" if self._keep else "without a backup"
            store.version.invalidate(f"their memory was released {why}")

    def map(self) -> None:
        """The same addresses again."""
        store = self._source.store
        if store.region is not None:
            store.region.map(store.region_bytes)

    def undo_map(self) -> None:
        """Back to sleep, with the backup."""
        if self._source.store.region is not None:
            self._source.store.region.unmap()

    def restore(self) -> None:
        """The values that the backup has."""
        if self._backup is not None:
            self._backup.restore()
            self.forget()

    def forget(self) -> None:
        """Drop the backup: the weights it was made of are no longer the engine's."""
        backup, self._backup = self._backup, None
        if backup is not None:
            backup.close()


class KVMemory:
    """The pages: mapped at the first generate and at each wake, as many as fit then."""

    def __init__(
        self,
        kv: KVCache,
        cache: PrefixCache,
        memory: Memory,
        config: EngineConfig,
        *,
        let_go: Callable[[], None],
    ) -> None:
        """`let_go` makes every request give up its pages."""
        self.kv = kv
        self.capacity: int | None = config.max_total_tokens
        """Most tokens of a request; None until pages are mapped."""
        self._cache = cache
        self._memory = memory
        self._config = config
        self._let_go = let_go

    @property
    def mapped(self) -> bool:
        """Whether there are pages."""
        return self.kv.num_pages > 0

    def release(self) -> None:
        """Every page, also those in use: their requests return to the queue."""
        self.kv.unmap()
        self._let_go()
        self._forget_pages()

    def map(self) -> None:
        """As many pages as the free memory allows."""
        size = kv_size(
            self._config,
            bytes_per_page=self.kv.layout.page_bytes,
            stripes=self.kv.layout.stripes,
            unit=self._memory.unit,
            most=self.kv.max_pages,
            free=self._memory.free(),
        )
        self.kv.map(size.pages)
        self._cache.pool.resize(size.pages)
        self.capacity = size.tokens

    def undo_map(self) -> None:
        """No page is left."""
        self.kv.unmap()
        self._forget_pages()

    def restore(self) -> None:
        """Nothing was saved."""

    def _forget_pages(self) -> None:
        self._cache.flush()
        self._cache.pool.resize(0)
        self.capacity = self._config.max_total_tokens


class GraphMemory:
    """What captured steps hold; after a wake they are captured anew as they are needed."""

    def __init__(self, graphs: DecodeGraphs | None) -> None:
        """`graphs`: None where nothing is captured; the tag has its state all the same."""
        self._graphs = graphs

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return 0 if self._graphs is None else self._graphs.nbytes

    def release(self) -> None:
        """All of it."""
        if self._graphs is not None:
            self._graphs.release()

    def map(self) -> None:
        """Nothing is taken before it is needed."""

    def undo_map(self) -> None:
        """Nothing was taken."""

    def restore(self) -> None:
        """Nothing was saved."""
